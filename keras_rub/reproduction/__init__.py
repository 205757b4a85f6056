"""The experiments of the paper, in pieces that can be interrupted."""
