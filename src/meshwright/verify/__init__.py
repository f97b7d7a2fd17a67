"""The parity ladder: a run's axes and features, turned on one by one against one float64 process."""
