"""What a checkpoint holds of model and optimizer, written and read; weights from Hugging Face."""
