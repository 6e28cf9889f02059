# mypy: ignore-errors
# ruff: noqa: RUF005, because Triton unpacks no tuples
# Triton compiles these functions from their source, and has its own types.
"""Triton kernels of the operators that add noise, sum gradients or compute norms."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def put_addresses(
    table, length, first, t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15
):
    """Write the addresses of up to 16 tensors, beginning with element ``first`` of the table."""
    tensors = (t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15)
    for i in tl.static_range(16):
        if first + i < length:
            tl.store(table + first + i, tensors[i].to(tl.int64))


@triton.jit
def with_products(
    tile, x, down, across, width, whole: tl.constexpr, precision: tl.constexpr, step: tl.constexpr
):
    """Add the products of the rows ``down`` and ``across`` of x to a tile.

    Without a mask, loads are faster. If ``whole``, rows are multiples of ``step`` long.
    """
    along = tl.arange(0, step)
    one = x + down[:, None] * width + along[None, :]
    other = x + across[:, None] * width + along[None, :]
    for k in range(0, width, step):
        if whole:
            a = tl.load(one)
            b = tl.load(other)
        else:
            inside = (k + along < width)[None, :]
            a = tl.load(one, mask=inside, other=0.0)
            b = tl.load(other, mask=inside, other=0.0)
        tile = tl.dot(a, tl.trans(b), tile, input_precision=precision)
        one += step
        other += step
    return tile


@triton.jit
def gram_norms(
    table, sums, tokens, width, height, layers, tiles, examples,
    bias: tl.constexpr, rows: tl.constexpr, half: tl.constexpr, aligned: tl.constexpr,
    long: tl.constexpr, joined: tl.constexpr, whole: tl.constexpr, precision: tl.constexpr,
    tile: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the products ``x xᵀ`` and ``g gᵀ``, for one layer and one example.

    The products have tokens × tokens elements. The tile's contributions to
    `dpbench.training.norms.GramSums` are added to ``sums``, ``[6, layers, B]``. The products
    are symmetric, so only tiles on or below the diagonal are computed, and a tile below the
    diagonal counts twice.

    ``table`` contains the addresses of each x, and then those of ``joined`` g for each x. If
    ``aligned``, the compiler may assume that these addresses are multiples of 16 bytes, and load
    several numbers at once. ``long`` is true if an example has more numbers than 32 bits can
    index. ``whole`` is true if both widths are multiples of ``step``.
    """
    number = tl.program_id(0) % tiles
    example = (tl.program_id(0) // tiles).to(tl.int64)
    layer = tl.program_id(1)
    i = tl.floor((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    i -= (i * (i + 1) // 2 > number).to(tl.int32)  # correct the rounding of the square root
    i += ((i + 1) * (i + 2) // 2 <= number).to(tl.int32)
    j = number - i * (i + 1) // 2
    down = i * tile + tl.arange(0, tile)
    across = j * tile + tl.arange(0, tile)
    inside = (down < tokens)[:, None] & (across < tokens)[None, :]
    # Behind the last row, the last row is loaded again, and its products are not counted.
    row = tl.minimum(down, tokens - 1)
    column = tl.minimum(across, tokens - 1)
    if long:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    kind: tl.constexpr = tl.bfloat16 if half else tl.float32
    of_x = tl.zeros((tile, tile), tl.float32)
    if rows:
        x = tl.load(table + layer).to(tl.pointer_type(tl.int64)) + example * tokens
        of_x = (tl.load(x + row)[:, None] == tl.load(x + column)[None, :]).to(tl.float32)
    else:
        x = tl.load(table + layer).to(tl.pointer_type(kind))
        x = (tl.multiple_of(x, 16) if aligned else x) + example * tokens * width
        of_x = with_products(of_x, x, row, column, width, whole, precision, step)
    of_g = tl.zeros((tile, tile), tl.float32)
    for each in tl.static_range(joined):
        g = tl.load(table + layers + layer * joined + each).to(tl.pointer_type(kind))
        g = (tl.multiple_of(g, 16) if aligned else g) + example * tokens * height
        of_g = with_products(of_g, g, row, column, height, whole, precision, step)
    if bias:
        of_x += 1.0
    of_x = tl.where(inside, of_x, 0.0)
    of_g = tl.where(inside, of_g, 0.0)
    # Each sum is over both axes: for sm_100, Triton 3.6 and 3.7 cannot compile a sum of a sum.
    both = of_x * of_g
    off = down[:, None] != across[None, :]
    times = tl.where(i == j, 1.0, 2.0)
    sums += layer * examples + example
    one = layers * examples
    tl.atomic_add(sums, times * tl.sum(both))
    tl.atomic_add(sums + 4 * one, times * tl.sum(of_x * of_x))
    tl.atomic_add(sums + 5 * one, times * tl.sum(of_g * of_g))
    if i == j:
        tl.atomic_add(sums + one, tl.sum(tl.where(off, 0.0, both)))
        tl.atomic_add(sums + 2 * one, tl.sum(tl.where(off, 0.0, of_x)))
        tl.atomic_add(sums + 3 * one, tl.sum(tl.where(off, 0.0, of_g)))


@triton.jit
def gram_sums(
    of_x, of_g, sums, tokens, examples, blocks,
    bias: tl.constexpr, rows: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    """Compute the sums of `gram_norms` over some rows of one example's products in memory."""
    example = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * rows + tl.arange(0, rows)
    at = (example * tokens + row)[:, None] * tokens
    both = tl.zeros((rows, some), of_x.dtype.element_ty)
    of_both, in_x, in_g, x_squares, g_squares = both, both, both, both, both
    for first in range(0, tokens, some):
        column = first + tl.arange(0, some)
        inside = (row < tokens)[:, None] & (column < tokens)[None, :]
        off = row[:, None] != column[None, :]
        x = tl.load(of_x + at + column[None, :], mask=inside, other=0.0)
        g = tl.load(of_g + at + column[None, :], mask=inside, other=0.0)
        if bias:
            x = tl.where(inside, x + 1.0, 0.0)
        both += x * g
        of_both += tl.where(off, 0.0, x * g)
        in_x += tl.where(off, 0.0, x)
        in_g += tl.where(off, 0.0, g)
        x_squares += x * x
        g_squares += g * g
    sums += example
    tl.atomic_add(sums, tl.sum(both))
    tl.atomic_add(sums + examples, tl.sum(of_both))
    tl.atomic_add(sums + 2 * examples, tl.sum(in_x))
    tl.atomic_add(sums + 3 * examples, tl.sum(in_g))
    tl.atomic_add(sums + 4 * examples, tl.sum(x_squares))
    tl.atomic_add(sums + 5 * examples, tl.sum(g_squares))


@triton.jit
def scaled(tensor, factors, product, length, blocks, block: tl.constexpr):
    """Multiply one block of an example's numbers by the example's clipping factor."""
    example = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    inside = at < length
    value = tl.load(tensor + example * length + at, mask=inside).to(tl.float32)
    tl.store(product + example * length + at, value * tl.load(factors + example), mask=inside)


@triton.jit
def weighted_sum(samples, factors, total, length, examples, block: tl.constexpr):
    """Compute one block of the sum of clipping factor × gradient over all examples."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < length
    added = tl.zeros((block,), tl.float32)
    for example in range(examples):
        value = tl.load(samples + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factors + example).to(tl.float32)
        added += tl.where(factor == 0, 0.0, value * factor)
        samples += length
    tl.store(total + at, added, mask=inside)


@triton.jit
def clear_dropped(tensor, factors, length, programs, block: tl.constexpr):
    """Write zeros over some blocks of an example, if the example's clipping factor is 0."""
    example = (tl.program_id(0) // programs).to(tl.int64)
    if tl.load(factors + example) == 0:
        tensor += example * length
        zeros = tl.zeros((block,), tensor.dtype.element_ty)
        for first in range((tl.program_id(0) % programs) * block, length, programs * block):
            at = first + tl.arange(0, block)
            tl.store(tensor + at, zeros, mask=at < length)


@triton.jit
def layer_norm_samples(
    x, g, weights, biases, tokens, width, eps,
    some: tl.constexpr, at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Add what some tokens contribute to an example's gradients, which begin as zeros."""
    example = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * some
    column = tl.arange(0, block)
    known = column < width
    of_weight = tl.zeros((block,), tl.float32)
    of_bias = tl.zeros((block,), tl.float32)
    for begin in range(first, min(first + some, tokens), at_once):
        token = begin + tl.arange(0, at_once)
        inside = (token < tokens)[:, None] & known[None, :]
        at = (example * tokens + token)[:, None] * width + column[None, :]
        given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, given - (tl.sum(given, 1) / width)[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
        of_weight += tl.sum(gradient * centred * scale[:, None], 0)
        of_bias += tl.sum(gradient, 0)
    tl.atomic_add(weights + example * width + column, of_weight, mask=known)
    tl.atomic_add(biases + example * width + column, of_bias, mask=known)


@triton.jit
def rotated(x, by: tl.constexpr):
    """Rotate words to the left, which a GPU does in one instruction."""
    return (x << by) | (x >> (32 - by))


@triton.jit
def quarter_round(a, b, c, d):
    """Mix four words of the state of ChaCha."""
    a += b
    d = rotated(d ^ a, 16)
    c += d
    b = rotated(b ^ c, 12)
    a += b
    d = rotated(d ^ a, 8)
    c += d
    b = rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def added(ours, others, weight):
    """Add weight × other number to each of 16 numbers."""
    sums = ()
    for i in tl.static_range(16):
        sums = sums + (ours[i] + weight * others[i],)
    return sums


@triton.jit
def random_words(stream, age, place, rounds: tl.constexpr):
    """Compute the 16 words of `dpbench.training.noise_stream.chacha` for each block in ``place``.

    The rounds are a loop, because Triton's passes would take minutes for so many operations.
    """
    none = tl.zeros_like(place)
    step = tl.load(stream + 5) - age
    words = (none + 0x61707865, none + 0x3320646E, none + 0x79622D32, none + 0x6B206574)
    for i in tl.static_range(4):
        pair = tl.load(stream + i)
        words = words + (none + pair.to(tl.uint32), none + (pair >> 32).to(tl.uint32))
    words = words + (place, none + tl.load(stream + 4).to(tl.uint32))
    words = words + (none + step.to(tl.uint32), none + (step >> 32).to(tl.uint32))
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = words
    for _ in range(rounds // 2):
        a0, b0, c0, d0 = quarter_round(a0, b0, c0, d0)
        a1, b1, c1, d1 = quarter_round(a1, b1, c1, d1)
        a2, b2, c2, d2 = quarter_round(a2, b2, c2, d2)
        a3, b3, c3, d3 = quarter_round(a3, b3, c3, d3)
        a0, b1, c2, d3 = quarter_round(a0, b1, c2, d3)
        a1, b2, c3, d0 = quarter_round(a1, b2, c3, d0)
        a2, b3, c0, d1 = quarter_round(a2, b3, c0, d1)
        a3, b0, c1, d2 = quarter_round(a3, b0, c1, d2)
    mixed = (a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)
    return added(words, mixed, 1)


@triton.jit
def normal_pair(a, b):
    """Compute two normal numbers from two random words of 32 bits (Box and Muller, 1958).

    Numbers of this function reach 6.8 standard deviations, but numbers of Triton's `randn` never
    exceed 5.7. Of exactly normal numbers, 1 in about 80 million exceeds 5.7. Sine and cosine are
    fast instructions of the GPU, without branches for large angles.
    """
    radius = tl.sqrt(-2.0 * tl.log(a.to(tl.float32) * 2.0**-32 + 2.0**-33))
    angle = (b.to(tl.float32) * 2.0**-32 + 2.0**-33) * 6.283185307179586
    return radius * libdevice.fast_sinf(angle), radius * libdevice.fast_cosf(angle)


@triton.jit
def normal_numbers(stream, age, place):
    """Compute 16 normal numbers for each block of ChaCha with 12 rounds, see `random_words`."""
    words = random_words(stream, age, place, 12)
    numbers = ()
    for i in tl.static_range(8):
        numbers = numbers + normal_pair(words[2 * i], words[2 * i + 1])
    return numbers


@triton.jit
def noisy_update(
    parameters, first, second, gradient, length, stream, weights, deviation, scale, rate, decay,
    shrink, beta1, alpha1, beta2, alpha2, correction, eps,
    formula: tl.constexpr, block: tl.constexpr, bands: tl.constexpr,
):  # fmt: skip
    """Add noise to 16 blocks of gradients, and update the parameters of these blocks.

    A program has 16 blocks, because ChaCha computes 16 random words at a time.
    `dpbench.training.noisy_updates.Scalars` has the formulas. With the formula ``mean``, the noisy
    mean gradient replaces the gradient, and no parameter is updated. The noise of an element does
    not depend on ``formula``. The noise is the sum over ``bands`` of weight × normal number, where
    band i has the normal numbers of i steps before. The first weight is 1.
    """
    program = tl.program_id(0)
    offset = tl.arange(0, block)
    place = (program * block + offset).to(tl.uint32)
    noise = normal_numbers(stream, 0, place)
    for band in range(1, bands):
        noise = added(noise, normal_numbers(stream, band, place), tl.load(weights + band))
    for i in tl.static_range(16):
        at = program.to(tl.int64) * 16 * block + i * block + offset
        inside = at < length
        total = tl.load(gradient + at, mask=inside).to(tl.float32)
        change = (total + deviation * noise[i]) * scale
        if formula == "mean":
            tl.store(gradient + at, change, mask=inside)
        else:
            value = tl.load(parameters + at, mask=inside).to(tl.float32)
            change += decay * value
            if formula != "plain":
                mean = tl.load(first + at, mask=inside).to(tl.float32)
                mean = beta1 * mean + alpha1 * change
                tl.store(first + at, mean, mask=inside)
                if formula == "adam":
                    square = tl.load(second + at, mask=inside).to(tl.float32)
                    square = beta2 * square + alpha2 * change * change
                    tl.store(second + at, square, mask=inside)
                    change = mean / (tl.sqrt(square) * correction + eps)
                elif formula == "nesterov":
                    change += beta1 * mean
                else:
                    change = mean
            tl.store(parameters + at, shrink * value - rate * change, mask=inside)
