"""Files as training data: sources, decoding, buckets, caches on disk, batches by position."""
