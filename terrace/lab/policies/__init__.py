"""What balance policies cost on the documents of a batch. Pure: no torch."""
