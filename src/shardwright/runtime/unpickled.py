"""What is said where a part of a model would be pickled as if it were the model."""

INSTEAD = (
    "All ranks together: sw.save(path, model, optimizer) writes a checkpoint that loads under any plan, "
    "shardwright.checkpoint.save_weights(path, model) writes safetensors, and model.full_state_dict(rank=0) has "
    "everything whole on rank 0, for torch.save"
)
"""What to do instead of pickling what one rank holds."""
