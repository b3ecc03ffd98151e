"""The learning-rate schedules that fairseq finds under --lr-scheduler."""
