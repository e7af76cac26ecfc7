"""What a checkpoint is: geometry, families, files and names. No tensors are computed here."""
