"""Folders of torch.distributed.checkpoint: of FSDP2, of NeMo Automodel and of torchtitan."""
