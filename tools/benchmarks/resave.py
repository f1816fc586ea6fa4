"""Load a Hugging Face directory with transformers, and save it in another: what conversion is
compared with.

$ python tools/benchmarks/resave.py SOURCE TARGET
"""

import sys

from transformers import AutoModelForCausalLM

AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
