"""Between text and tokens: the tokenizer, the chat template, the length check and the streaming detokenizer."""
