"""The context axis at run time: attention of tokens that are spread over ranks."""
