"""Reading long texts and writing on: key-value cache, chunked prefill, decoding, sampling, over tensor and pipeline
parallelism."""
