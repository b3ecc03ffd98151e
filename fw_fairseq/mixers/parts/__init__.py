"""The parts of a fast-weight layer around the recurrence: gates that are more than a projection, convolution and output. Also the
memory of a whole sentence."""
