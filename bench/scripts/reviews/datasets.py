"""In place of Hugging Face's data sets: random reviews of films."""

import torch

torch.manual_seed(0)


class _Reviews(list):
    def map(self, function, **_):
        return self

    def set_format(self, **_):
        pass


def load_dataset(*_, **__):
    """Reviews as token ids of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def reviews(number):
        lengths = torch.randint(8, 32, (number,), generator=generator)
        return _Reviews(
            {
                "input_ids": torch.randint(1, 100, (int(length),), generator=generator),
                "label": torch.tensor(index % 2),
            }
            for index, length in enumerate(lengths)
        )

    class Splits(dict):
        def map(self, *_, **__):
            return self

        def set_format(self, **_):
            pass

    return Splits(train=reviews(64), test=reviews(32))
