"""The parts of a fast-weight layer around the recurrence: gates that are more than a projection, convolution, output."""
