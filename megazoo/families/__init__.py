"""What is known of model families without their code: the registry, names of tensors, fields of
configs."""
