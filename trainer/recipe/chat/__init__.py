"""``ftmon chat``: a conversation with a trained model, or with a checkpoint of a run that is still training."""
