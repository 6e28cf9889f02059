"""In place of Hugging Face's tokenizers, which would be downloaded."""


class BertTokenizerFast:
    """Has a vocabulary, and nothing to tokenize."""

    vocab_size = 100

    @classmethod
    def from_pretrained(cls, *_, **__):
        """The tokenizer."""
        return cls()

    def __len__(self):
        return self.vocab_size
