"""fw-plot: figures and tables of the papers from logged results."""
