"""The shared vector-search pool: files, payloads, threads and HTTP around ``ppd.ann``."""
