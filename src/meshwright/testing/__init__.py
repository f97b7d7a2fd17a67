"""What tests share: a rank runner, exact tensors, tiny models. Nothing else imports this package."""
