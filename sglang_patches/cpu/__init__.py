"""What SGLang needs to serve on a machine without GPU: installer, launcher, kernels."""
