"""Image classifiers with their processors and input shapes, and disjoint splits of labelled data sets."""
