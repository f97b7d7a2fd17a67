"""What people see of a run while it goes on. A leaf: plain values come in, text goes out."""
