"""Updates on flat memory: an optimizer sees a run of elements, its gradient and its state, never a tensor's name."""
