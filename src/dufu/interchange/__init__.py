"""Weights from and to other formats: files that are read by rows and written one tensor at a time, in any layout."""
