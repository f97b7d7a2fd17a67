"""Where text comes from: one file a format, each a generator of documents in constant memory."""
