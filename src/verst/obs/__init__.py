"""What a run leaves to look at: metrics, events, pictures, TensorBoard files, and the display while it runs. No torch."""
