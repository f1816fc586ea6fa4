"""What programs share: settings, their rules and flags, how ranks start and end, and what a run
records."""
