"""What the tests of the Helm chart, the kustomize overlay and the images share."""
