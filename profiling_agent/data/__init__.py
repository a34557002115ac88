"""Data and models: an image classifier, its image processor and input shape, and disjoint splits of a labelled data set."""
