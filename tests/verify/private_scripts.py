"""Private scripts: right ones as people write them, and wrong ones with the check that finds it."""

from __future__ import annotations

START = """
import copy, sys, torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loss_of = nn.functional.cross_entropy


def net(first=()):
    return nn.Sequential(*first, nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))


def loader_of(width=16, number=96):
    data = TensorDataset(torch.randn(number, width), torch.randint(3, (number,)))
    return DataLoader(data, batch_size=8)


def private(model, made=torch.optim.SGD, **options):
    options = dict(noise_multiplier=1.0, max_grad_norm=0.5, poisson_sampling=False) | options
    return PrivacyEngine().make_private(
        module=model, optimizer=made(model.parameters(), lr=0.1),
        data_loader=options.pop("data_loader", None) or loader_of(), **options)
"""

MADE = """
model, opt, loader = private(net())
"""

TRAIN = """
for x, y in loader:
    loss_of(model(x), y).backward()
    opt.step()
    opt.zero_grad()
"""


def derived(body: str, start: str = "") -> str:
    """Return a script whose private optimizer is of a derived class with these methods."""
    lines = "".join(f"\n    {line}" for line in body.strip("\n").splitlines())
    return f"{MADE}{start}\nclass Own(type(opt)):{lines}\nopt.__class__ = Own\n{TRAIN}"


def noise(expression: str, start: str = "") -> str:
    """Return a script that adds own noise, of σC = ``d``, to each parameter ``p`` with index i."""
    return derived(
        f"""
def add_noise(s):
    s.n, d = getattr(s, "n", 0) + 1, s.noise_multiplier * s.max_grad_norm
    for i, p in enumerate(s.params):
        p.grad = p.summed_grad + {expression}
""",
        start,
    )


def clipping(expression: str) -> str:
    """Return a script with own factors by example, from gradients ``g`` and the threshold C."""
    return derived(
        f"""
def clip_and_accumulate(s):
    C, g = s.max_grad_norm, [p.grad_sample for p in s.params]
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in g], 1)
    f = {expression}
    for i, p in enumerate(s.params):
        grad = torch.einsum("n,n...", f[:, i] if f.ndim == 2 else f, g[i])
        p.summed_grad = grad if p.summed_grad is None else p.summed_grad + grad
"""
    )


def after(line: str, start: str = "", made: str = MADE) -> str:
    """Return a script in which a line follows each step."""
    raw = "    raw = [p.grad_sample.mean(0) for p in opt.params]\n    opt.step()\n"
    with_line = TRAIN.replace(
        "    opt.step()\n", f"{raw}    with torch.no_grad():\n        {line}\n"
    )
    return made + start + "\n" + with_line


def beside(loss: str, start: str, made: str = MADE) -> str:
    """Return a script that trains other parameters with a plain optimizer on another loss."""
    return f"""{made}{start}
for x, y in loader:
    ({loss}).backward()
    opt.step(); plain.step()
    opt.zero_grad(); plain.zero_grad()
"""


LAYER = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(16)); self.register_buffer("count", torch.zeros(3))
    def forward(self, x):
        BODY
        return x
model, opt, loader = private(net([Layer()]))
"""

PLAIN_HEAD = "plain = torch.optim.SGD(head.parameters(), lr=0.1)\n"

NOISE, GRADIENT, TRAINED = "noise", "gradient", "trained by private steps"

WRONG_NOISE = {
    "seed in the loop": MADE + TRAIN.replace("loss_of(", "torch.manual_seed(1); loss_of("),
    "seed before noise": derived("""
def add_noise(s):
    torch.manual_seed(3); super().add_noise()
"""),
    "one noise for all steps": derived("""
def add_noise(s):
    d = s.noise_multiplier * s.max_grad_norm
    s.z = getattr(s, "z", None) or [torch.randn_like(p) for p in s.params]
    for z, p in zip(s.z, s.params): p.grad = p.summed_grad + d * z
"""),
    "no noise on biases": noise("d * torch.randn_like(p) * (p.ndim > 1)"),
    "no noise on the last layer": noise("d * torch.randn_like(p) * (i < 2)"),
    "noise in second steps": noise("d * torch.randn_like(p) * (s.n % 2)"),
    "noise by a counter": noise(
        "d * torch.randn_like(p) * (count(i) % 2)",
        """
calls = [0]
def count(i):
    calls[0] += i == 0
    return calls[0]
""",
    ),
    "half of the noise": noise("d / 2 * torch.randn_like(p)"),
    "noise without C": noise("s.noise_multiplier * torch.randn_like(p)"),
    "uniform noise": noise("d * 12**0.5 * (torch.rand_like(p) - 0.5)"),
    "rounded noise": noise("d * torch.randn_like(p).sign()"),
    "noise by row": noise("d * torch.randn(p.shape[-1:])"),
    "noise of one draw": noise("d * s.z[: p.numel()].view_as(p)").replace(
        "    for i,", "    s.z = torch.randn(400)\n        for i,"
    ),
    "noise that fades": noise("d * 0.7**s.n * torch.randn_like(p)"),
    "noise thrown away": derived("""
def pre_step(s, closure=None):
    done = super().pre_step(closure)
    for p in s.params: p.grad = p.summed_grad / s.expected_batch_size
    return done
"""),
    "sigma 0": MADE.replace("net()", "net(), noise_multiplier=0.0") + TRAIN,
    "sigma fades to 0": after("opt.noise_multiplier = 0.0"),
}

TRAINED_OTHERWISE = {
    "noise taken off before the inner step": MADE
    + """
def clean(inner, *_):
    for p in opt.params: p.grad = p.summed_grad / 8
opt.original_optimizer.register_step_pre_hook(clean)
"""
    + TRAIN,
    "plain head": beside("loss_of(head(model(x)), y)", "head = nn.Linear(3, 3)\n" + PLAIN_HEAD),
    "plain head on detached features": beside(
        "loss_of(out := model(x), y) + loss_of(head(out.detach()), y)",
        "head = nn.Linear(3, 3)\n" + PLAIN_HEAD,
    ),
    "plain body": beside(
        "loss_of(model(body(x)), y)",
        """
body = nn.Linear(16, 16)
plain = torch.optim.Adam(body.parameters(), lr=0.1)
""",
    ),
    "plain student": beside(
        "loss_of(out := model(x), y) + (student(x) - out.detach()).square().mean()",
        "student = net()\nplain = torch.optim.SGD(student.parameters(), lr=0.1)\n",
    ),
    "plain weight of the loss": beside(
        "(loss := loss_of(model(x), y)) + (loss.detach() * weight).square()",
        "weight = nn.Parameter(torch.ones(()))\nplain = torch.optim.SGD([weight], lr=0.1)\n",
    ),
    "inputs that are trained": beside(
        "loss_of(model(x + prompt), y)",
        """
prompt = nn.Parameter(torch.zeros(16))
plain = torch.optim.SGD([prompt], lr=0.1)
""",
    ),
    "raw update after the step": after("[p.sub_(.1 * g) for p, g in zip(opt.params, raw)]"),
    "raw update of one bias": after("opt.params[1].sub_(.1 * raw[1])"),
    "raw momentum": after(
        "[opt.state[p]['momentum_buffer'].add_(g) for p, g in zip(opt.params, raw)]",
        made=MADE.replace("net()", "net(), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)"),
    ),
    "bias set to a mean of data": after("opt.params[-1].add_(.01 * x.mean())"),
    "raw second moment": after(
        "[opt.state[p]['exp_avg_sq'].copy_(g * g) for p, g in zip(opt.params, raw)]",
        made=MADE.replace("net()", "net(), torch.optim.Adam"),
    ),
    "buffer of inputs": LAYER.replace(
        "BODY", "self.seen.mul_(.9).add_(x.detach().mean(0), alpha=.1)"
    )
    + TRAIN,
    "buffer of the largest input": LAYER.replace(
        "BODY", "self.seen = torch.maximum(self.seen, x.detach().amax(0))"
    )
    + TRAIN,
    "buffer of labels": after(
        "model._module[0].count += nn.functional.one_hot(y, 3).sum(0)",
        made=LAYER.replace("BODY", "pass"),
    ),
    "head trained by hand": MADE
    + "W = torch.zeros(3, 3, requires_grad=True)\n"
    + TRAIN.replace(
        "loss_of(model(x), y)", "(loss_of(out := model(x), y) + loss_of(out.detach() @ W, y))"
    ).replace(
        "    opt.zero", "    with torch.no_grad(): W -= .1 * W.grad; W.grad = None\n    opt.zero"
    ),
    "second of two buffers of one name": LAYER.replace("BODY", "self.seen += x.detach().mean(0)")
    + "other = net([Layer()]).requires_grad_(False)\nother[0].forward = lambda x: x\n"
    + TRAIN.replace("    loss_of", "    other(x)\n    loss_of"),
    "batches without a loader": """
model = GradSampleModule(net()); X, Y = torch.randn(96, 16), torch.randint(3, (96,))
opt = DPOptimizer(torch.optim.SGD(model.parameters(), .1), noise_multiplier=1., max_grad_norm=.5,
                  expected_batch_size=8)
head = nn.Linear(3, 3); plain = torch.optim.SGD(head.parameters(), lr=0.1)
for k in range(6):
    x, y = X[8 * k: 8 * k + 8], Y[8 * k: 8 * k + 8]
    out = model(x); (loss_of(out, y) + loss_of(head(out.detach()), y)).backward()
    opt.step(); plain.step(); opt.zero_grad(); plain.zero_grad()
""",
    "batch norm of a frozen body": MADE
    + "body = nn.BatchNorm1d(16)\n"
    + TRAIN.replace("    loss_of", "    with torch.no_grad(): x = body(x)\n    loss_of"),
    "centers of features in the loss": MADE
    + "centers = torch.zeros(3, 3)\n"
    + TRAIN.replace(
        "loss_of(model(x), y)",
        "(loss_of(out := model(x), y) + .1 * (out - centers[y]).square().mean())",
    )
    + "    with torch.no_grad(): centers.index_add_(0, y, .1 * (out.detach() - centers[y]))\n",
    "mean of inputs in an attribute": LAYER.replace(
        "BODY", "self.mean = .9 * self.mean + .1 * x.detach().mean(0); x = x - self.mean"
    ).replace("super().__init__()", "super().__init__(); self.mean = 0")
    + TRAIN,
    "batch norm without parameters before the model": MADE
    + "norm = nn.BatchNorm1d(16, affine=False)\n"
    + TRAIN.replace("model(x)", "model(norm(x))"),
}

WRONG_GRADIENTS = {
    "not clipped": clipping("torch.ones(len(norms))"),
    "never clipped": clipping("torch.ones(len(norms))").replace(
        "net()", "net(), max_grad_norm=30.0"
    ),
    "clipped to 2C": clipping("(2 * C / norms.norm(dim=1)).clamp(max=1)"),
    "each parameter clipped to C": clipping("(C / norms).clamp(max=1)"),
    "norm without biases": clipping("(C / norms[:, ::2].norm(dim=1)).clamp(max=1)"),
    "largest norm of a layer": clipping("(C / norms.amax(1)).clamp(max=1)"),
    "clipped as a batch": clipping(
        "(C / torch.cat([e.mean(0).flatten() for e in g]).norm()).clamp(max=1).expand(8)"
    ),
    "only the first half clipped": clipping(
        "torch.cat([(C / norms[:4].norm(dim=1)).clamp(max=1), torch.ones(len(norms) - 4)])"
    ),
    "last layer not clipped": clipping(
        "torch.cat([(C / norms[:, :2].norm(dim=1)).clamp(max=1)[:, None].expand(-1, 2), "
        "torch.ones_like(norms[:, 2:])], 1)"
    ),
    "gradient added twice": noise("p.summed_grad + d * torch.randn_like(p)"),
    "time clipped as examples": """
model = GradSampleModule(net(), loss_reduction="mean"); loader = loader_of()
opt = DPOptimizer(torch.optim.SGD(model.parameters(), .1), noise_multiplier=1., max_grad_norm=.5,
                  expected_batch_size=8)
"""
    + TRAIN.replace("model(x)", "model(torch.stack([x, -x, 2 * x])).mean(0)"),
    "two crops clipped one by one": MADE
    + TRAIN.replace("model(x), y", "model(torch.cat([x, x + 1])), torch.cat([y, y])"),
    "layer that mixes examples": """
class Mix(nn.Module):
    def forward(self, x): return x - x.mean(0)
model, opt, loader = private(net([Mix()]))
"""
    + TRAIN,
    "raw gradients in a hook of the step": MADE
    + """
def hook(optimizer):
    for p in optimizer.params: p.grad += .05 * p.grad_sample.mean(0)
opt.attach_step_hook(hook)
"""
    + TRAIN,
    "ghost hooks with a threshold of their own": MADE.replace(
        "model, opt,", "model, opt, criterion,"
    ).replace(
        "net()",
        "net(), max_grad_norm=20.0, grad_sample_mode='ghost', criterion=nn.CrossEntropyLoss()",
    )
    + "model.max_grad_norm = 1000.0\n"
    + TRAIN.replace("loss_of", "criterion"),
    "crops beside generated rows": MADE
    + TRAIN.replace(
        "model(x), y", "model(torch.cat([x, x + 1, torch.randn(8, 16)])), torch.cat([y, y, y])"
    ),
}

WITHOUT_STEPS = {
    "inner optimizer steps": MADE + TRAIN.replace("opt.step()", "opt.original_optimizer.step()"),
    "inner optimizer steps at times": MADE
    + "k = 0\n"
    + TRAIN.replace(
        "    opt.step()", "    k += 1\n    (opt if k % 2 else opt.original_optimizer).step()"
    ),
    "no privacy": """
model, loader = net(), loader_of(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
}

FUSED = """
import dpbench
data = loader_of().dataset
model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
made, options = torch.optim.SGD, {}


def losses(model, batch):
    return loss_of(model(batch[0]), batch[1], reduction="none")


def fused(**options):
    options = dict(batch_size=8, max_grad_norm=0.5, noise_multiplier=1.0) | options
    return dpbench.make_private(model, made(model.parameters(), lr=0.1), data, **options)
"""

STEPS = """
for batch in private.loader:
    private.step(batch, losses)
"""

LOOP = """
for x, y in private.loader:
    private.optimizer.zero_grad()
    loss_of(model(x), y).backward()
    private.optimizer.step()
"""

MADE_BY_FUSED = f"{FUSED}private = fused()\n"

WRONG_FUSED = {
    "fused, not clipped": (
        GRADIENT,
        MADE_BY_FUSED
        + "private.trainer.factors_for = lambda norms: torch.ones(len(norms[0]))"
        + STEPS,
    ),
    "fused, half the noise": (
        NOISE,
        MADE_BY_FUSED
        + """
from dpbench.training import fused as method
mean = method.noisy_mean
method.noisy_mean = lambda sums, stream, deviation, *rest: mean(sums, stream, deviation / 2, *rest)
try:
    for batch in private.loader:
        private.step(batch, losses)
finally:  # tests run in the same process
    method.noisy_mean = mean
""",
    ),
    "fused, and a raw update": (
        TRAINED,
        MADE_BY_FUSED + STEPS + "    with torch.no_grad(): model[0].bias += batch[0].mean()",
    ),
}

RIGHT_FUSED = {
    "fused, steps in parts, AdamW": FUSED
    + "made = torch.optim.AdamW\nprivate = fused(physical_batch_size=3)"
    + STEPS,
    "fused, parts of batches as large as examples are wide": (
        f"{FUSED}private = fused(batch_size=16, physical_batch_size=8, seed=2){STEPS}"
    ),
    "fused, the usual loop": MADE_BY_FUSED + LOOP,
    "fused, sums and momentum": (
        f"{FUSED}made = partial(made, momentum=0.9)\nprivate = fused(loss_reduction='sum'){LOOP}"
    )
    .replace("import dpbench", "import dpbench\nfrom functools import partial", 1)
    .replace("model(x), y)", "model(x), y, reduction='sum')"),
    "fused, empty batches": f"{FUSED}private = fused(batch_size=1, seed=9){STEPS}",
}

WRONG = {
    **WRONG_FUSED,
    **{name: (NOISE, text) for name, text in WRONG_NOISE.items()},
    **{name: (TRAINED, text) for name, text in TRAINED_OTHERWISE.items()},
    **{name: (GRADIENT, text) for name, text in WRONG_GRADIENTS.items()},
    **{name: ("clipping and noise", text) for name, text in WITHOUT_STEPS.items()},
}
"""Wrong scripts, with the check that fails."""

RIGHT: dict[str, str] = {
    **RIGHT_FUSED,
    "closure": MADE
    + """
for x, y in loader:
    def closure():
        opt.zero_grad(); loss = loss_of(model(x), y); loss.backward(); return loss
    opt.step(closure)
""",
    "two parts of a step": MADE
    + TRAIN.replace("opt.step()", "opt.original_optimizer.step() if opt.pre_step() else None"),
    "own noise": derived("""
def pre_step(s, closure=None):
    s.clip_and_accumulate()
    d = s.noise_multiplier * s.max_grad_norm
    for p in s.params: p.grad = p.summed_grad + torch.randn_like(p) * d
    s.scale_grad(); return True
"""),
    "own threshold": clipping("(0.5 / (norms.norm(dim=1) + 1e-6)).clamp(max=1)").replace(
        "def clip_",
        "def add_noise(s):\n        for p in s.params: p.grad = p.summed_grad + "
        "s.noise_multiplier * 0.5 * torch.randn_like(p)\n    def clip_",
    ),
    "other generator": MADE + "opt.generator = torch.Generator().manual_seed(5)\n" + TRAIN,
    "sum of losses": MADE.replace("net()", "net(), loss_reduction='sum'")
    + TRAIN.replace("y)", "y, reduction='sum')"),
    "regularizer by its own": MADE
    + TRAIN.replace(
        "    opt.step",
        "    (.01 * sum(p.square().sum() for p in model.parameters())).backward()\n    opt.step",
    ),
    "evaluation between steps": MADE
    + TRAIN
    + """
    model.eval()
    with torch.no_grad(): print(loss_of(model(x), y).item())
    model.train()
""",
    "clamped weights": after("[p.clamp_(-.2, .2) for p in opt.params]"),
    "average of weights": after(
        "[a.lerp_(p, .1) for a, p in zip(mean.parameters(), opt.params)]", "mean = net()"
    ),
    "federated averaging": """
clients = [private(net()) for _ in range(2)]
for _ in range(3):
    for model, opt, loader in clients:
        for k, (x, y) in enumerate(loader):
            loss_of(model(x), y).backward(); opt.step(); opt.zero_grad()
            if k == 1: break
    with torch.no_grad():
        for each in zip(*(model.parameters() for model, *_ in clients)):
            mean = torch.stack(each).mean(0); [p.copy_(mean) for p in each]
""",
    "rounds": """
model = net(); plain = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    wrapped, opt, loader = private(model, lambda *_, **__: plain, data_loader=loader_of(number=16))
    for x, y in loader: loss_of(wrapped(x), y).backward(); opt.step(); opt.zero_grad()
    model = wrapped.to_standard_module()
""",
    "schedules of noise and threshold": MADE
    + """
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
schedules = ExponentialNoise(opt, gamma=0.9), ExponentialGradClip(opt, gamma=0.9)
"""
    + TRAIN
    + "    [each.step() for each in schedules]\n",
    "adaptive clipping": """
model, loader = GradSampleModule(net()), loader_of()
opt = AdaClipDPOptimizer(
    torch.optim.SGD(model.parameters(), .1), noise_multiplier=1., max_grad_norm=1.,
    target_unclipped_quantile=.5, clipbound_learning_rate=.2, max_clipbound=10., min_clipbound=.01,
    unclipped_num_std=1., expected_batch_size=8)
"""
    + TRAIN,
    "adaptive ghost clipping": """
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
class Losses(nn.Module):
    reduction = "mean"
    def forward(self, x, y): return loss_of(x, y, reduction="none")
model = net(); data = loader_of().dataset
model, opt, criterion, loader = PrivacyEngineAdaptiveClipping().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=Losses(),
    data_loader=DataLoader(data, batch_size=24), noise_multiplier=1.0, max_grad_norm=1.0,
    grad_sample_mode="ghost", poisson_sampling=False, target_unclipped_quantile=0.5,
    min_clipbound=0.01, max_clipbound=100.0, clipbound_learning_rate=0.2)
"""
    + TRAIN.replace("loss_of", "criterion"),
    "generator of a private discriminator": MADE
    + """
maker = nn.Linear(4, 16); plain = torch.optim.Adam(maker.parameters(), 1e-3)
for x, _ in loader:
    made = maker(torch.randn(8, 4))
    opt.zero_grad()
    loss_of(model(made.detach()), torch.zeros(8).long()).backward(); opt.step(); opt.zero_grad()
    loss_of(model(x), torch.ones(8).long()).backward(); opt.step(); opt.zero_grad()
    plain.zero_grad()
    loss_of(model(made), torch.ones(8).long()).backward(); plain.step()
""",
    "discriminator as in Opacus's example": """
critic, maker = nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU(), nn.Linear(8, 1)), nn.Sequential(
    nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh())
critic, opt, loader = private(critic, torch.optim.Adam); bce = nn.BCEWithLogitsLoss()
plain = torch.optim.Adam(maker.parameters(), 1e-3)
for x, _ in loader:
    opt.zero_grad(set_to_none=True)
    real = bce(critic(x), torch.ones(8, 1)); made = maker(torch.randn(8, 4))
    (real + bce(critic(made.detach()), torch.zeros(8, 1))).backward()
    opt.step(); opt.zero_grad(set_to_none=True)
    plain.zero_grad()
    bce(critic(made), torch.ones(8, 1)).backward(); plain.step()
""",
    "discriminator of real and made rows in one batch": """
critic = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(.2), nn.GroupNorm(2, 4),
                       nn.Conv2d(4, 1, 4), nn.Flatten(0), nn.Sigmoid())
maker = nn.Sequential(nn.ConvTranspose2d(6, 4, 4), nn.BatchNorm2d(4), nn.ReLU(),
                      nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh())
data = DataLoader(TensorDataset(torch.rand(96, 1, 8, 8), torch.zeros(96)), batch_size=8)
critic, opt, loader = private(critic, torch.optim.Adam, data_loader=data)
plain, bce = torch.optim.Adam(maker.parameters(), 1e-3), nn.BCELoss()
for x, _ in loader:
    made = maker(torch.randn(len(x), 6, 1, 1)); opt.zero_grad()
    wanted = torch.cat([torch.ones(len(x)), torch.zeros(len(x))])
    bce(critic(torch.cat([x, made.detach()])), wanted).backward(); opt.step(); opt.zero_grad()
    plain.zero_grad(); bce(critic(made), torch.ones(len(x))).backward(); plain.step()
""",
    "generator and batches without a loader": """
X, bce = torch.randn(96, 16), nn.BCEWithLogitsLoss()
critic = GradSampleModule(nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU(), nn.Linear(8, 1)))
opt = DPOptimizer(torch.optim.Adam(critic.parameters(), 1e-3), noise_multiplier=1.,
                  max_grad_norm=.5, expected_batch_size=8)
maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 16))
plain = torch.optim.Adam(maker.parameters(), 1e-3)
for k in range(6):
    made, x = maker(torch.randn(8, 4)), X[torch.randint(96, (8,))]
    (bce(critic(x), torch.ones(8, 1)) + bce(critic(made.detach()), torch.zeros(8, 1))).backward()
    opt.step(); opt.zero_grad()
    plain.zero_grad(); bce(critic(made), torch.ones(8, 1)).backward(); plain.step()
    opt.zero_grad()
""",
    "batches copied a step ahead": MADE
    + """
batches = iter(loader); ahead = [each.clone() for each in next(batches)]
while ahead:
    (x, y), ahead = ahead, next(batches, None); ahead = ahead and [each.clone() for each in ahead]
    loss_of(model(x), y).backward(); opt.step(); opt.zero_grad()
""",
    "the best model of an epoch": MADE
    + """
best, kept = 1e9, None
"""
    + TRAIN
    + """
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "kept.pt")
    opt.load_state_dict(torch.load("kept.pt")["opt"])
    with torch.no_grad(): loss = loss_of(model.eval()(torch.ones(9, 16)), torch.zeros(9).long())
    model.train()
    if loss < best: best, kept = loss, {k: v.clone() for k, v in model.state_dict().items()}
    elif kept: model.load_state_dict(kept)
""",
    "adversarial inputs": MADE
    + TRAIN.replace(
        "    loss_of",
        """
    shift = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        loss_of(twin(x + shift), y).backward()
        with torch.no_grad(): shift += .01 * shift.grad.sign()
    x = (x + shift).detach()
    twin.zero_grad()
    loss_of""",
        1,
    ).replace("for x, y", "twin = net().requires_grad_(False)\nfor x, y", 1),
    "teacher without an optimizer": MADE
    + "teacher = net()\n"
    + TRAIN.replace("loss_of(model(x), y)", "loss_of(model(x), teacher(x).argmax(1))"),
    "model of public data": MADE
    + """
other, public = net(), loader_of(); plain = torch.optim.SGD(other.parameters(), lr=0.1)
for (x, y), (a, b) in zip(loader, public):
    loss_of(model(x), y).backward(); opt.step(); opt.zero_grad()
    loss_of(other(a), b).backward(); plain.step(); plain.zero_grad()
""",
    "two private models": MADE
    + "other, opt2, _ = private(net())"
    + TRAIN.replace(
        "    opt.step()",
        "    loss_of(other(x), y).backward(); opt.step(); opt2.step(); opt2.zero_grad()",
    ),
    "time first": """
model = GradSampleModule(net(), loss_reduction="mean", batch_first=False); loader = loader_of()
opt = DPOptimizer(torch.optim.SGD(model.parameters(), .1), noise_multiplier=1., max_grad_norm=.5,
                  expected_batch_size=8)
"""
    + TRAIN.replace("model(x)", "model(torch.stack([x, -x, 2 * x])).mean(0)"),
    "features beside logits": """
class Features(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 3)
    def forward(self, x): h = self.a(x).relu(); return {"logits": self.b(h), "states": (h, h)}
model, opt, loader = private(Features())
"""
    + TRAIN.replace(
        "loss_of(model(x), y)",
        "(out := model(x)) and (loss_of(out['logits'], y) + .1 * out['states'][0].square().mean())",
    ),
    "counter in a buffer": LAYER.replace("BODY", "self.seen += 1") + TRAIN,
    "recurrent layers": """
from opacus.layers import DPLSTM
class Names(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(12, 3)
        self.rnn = DPLSTM(8, 12, batch_first=True)
    def forward(self, x): return self.out(self.rnn(self.words(x))[0][:, -1])
data = TensorDataset(torch.randint(20, (96, 5)), torch.randint(3, (96,)))
model, opt, loader = private(Names(), torch.optim.Adam, data_loader=DataLoader(data, batch_size=8))
"""
    + TRAIN,
    "words, Poisson batches, an epsilon": """
class Words(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.out = nn.Embedding(30, 8), nn.Linear(8, 3)
    def forward(self, x): return self.out(self.emb(x).mean(1))
data = [(torch.randint(30, (k % 5 + 2,)), k % 3) for k in range(96)]
def padded(batch):
    texts = nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True)
    return {"x": texts, "y": torch.tensor([y for _, y in batch])}
model = Words(); engine = PrivacyEngine(accountant="rdp")
model, opt, loader = engine.make_private_with_epsilon(
    module=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), epochs=3,
    data_loader=DataLoader(data, batch_size=8, collate_fn=padded), target_epsilon=5.0,
    target_delta=1e-3, max_grad_norm=1.0)
for _ in range(3):
    for batch in loader:
        loss_of(model(batch["x"]), batch["y"]).backward(); opt.step(); opt.zero_grad()
""",
    "empty Poisson batches": MADE.replace(
        "net()", "net(), poisson_sampling=True, data_loader=loader_of(number=16)"
    ).replace(
        "model,",
        """
def loader_of(width=16, number=96):
    data = TensorDataset(torch.randn(number, width), torch.randint(3, (number,)))
    return DataLoader(data, batch_size=1)
model,""",
    )
    + TRAIN,
    "16 bits of autocast": MADE
    + TRAIN.replace(
        "    loss_of(model(x), y).backward()",
        "    with torch.autocast('cpu', torch.bfloat16): out = model(x)\n"
        "    loss_of(out.float(), y).backward()",
    ),
    "scaled loss": MADE
    + "scaler = torch.amp.GradScaler('cpu', init_scale=4.0)\n"
    + TRAIN.replace(
        "loss_of(model(x), y).backward()", "scaler.scale(loss_of(model(x), y)).backward()"
    ).replace(
        "    opt.step()",
        "    for p in opt.params: p.grad_sample /= scaler.get_scale()\n"
        "    scaler.step(opt); scaler.update()",
    ),
    "own loader with workers": MADE.replace(
        "net()", "net(), data_loader=DataLoader(loader_of().dataset, batch_size=8, num_workers=1)"
    )
    + TRAIN,
    "frozen body, groups of parameters, a warm-up": """
inner = net(); inner[0].requires_grad_(False)
groups = lambda p, lr: torch.optim.AdamW(
    [{"params": [inner[2].weight]}, {"params": [inner[2].bias], "lr": 0.01}], lr=lr)
model, opt, loader = private(inner, groups)
rate = torch.optim.lr_scheduler.LambdaLR(opt.original_optimizer, lambda n: min(1.0, n / 3))
"""
    + TRAIN
    + "    rate.step()\n",
    "raw losses are printed": MADE
    + TRAIN
    + "    print(loss_of(model.eval()(x), y).item()); model.train()\n",
    "convolutions": """
def images(): return nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))
data = TensorDataset(torch.randn(96, 1, 8, 8), torch.randint(3, (96,)))
given = DataLoader(data, batch_size=8)
model, opt, loader = private(images(), torch.optim.RMSprop, data_loader=given)
"""
    + TRAIN,
    "attention": """
from opacus.layers import DPMultiheadAttention
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.out = DPMultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
    def forward(self, x):
        x = x.view(len(x), 2, 8); return self.out(self.attend(x, x, x)[0].mean(1))
model, opt, loader = private(Attends())
"""
    + TRAIN,
    "batches by index": """
model = GradSampleModule(net()); X, Y = torch.randn(96, 16), torch.randint(3, (96,))
opt = DPOptimizer(torch.optim.SGD(model.parameters(), .1), noise_multiplier=1., max_grad_norm=.5,
                  expected_batch_size=8)
for k in range(6):
    x, y = X[8 * k: 8 * k + 8], Y[8 * k: 8 * k + 8]
    loss_of(model(x), y).backward(); opt.step(); opt.zero_grad()
""",
    "transformer with adapters": """
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=32, num_labels=3)
lora = LoraConfig(r=2, target_modules=["query"])
model = get_peft_model(BertForSequenceClassification(config), lora)
data = [{"input_ids": torch.randint(50, (6,)), "labels": torch.randint(3, ())} for _ in range(96)]
model, opt, loader = private(model, data_loader=DataLoader(data, batch_size=8))
for batch in loader:
    model(**batch, output_hidden_states=True).loss.backward(); opt.step(); opt.zero_grad()
""",
    "Trainer of transformers": """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=32, num_labels=3)
data = [{"input_ids": torch.randint(50, (6,)), "labels": torch.randint(3, ())} for _ in range(96)]
inner = BertForSequenceClassification(config)
inner.bert.embeddings.requires_grad_(False)
model, opt, _ = private(inner, data_loader=DataLoader(data, batch_size=8))
arguments = TrainingArguments("out", per_device_train_batch_size=8, max_steps=6, report_to=[],
                              use_cpu=True, save_strategy="no", max_grad_norm=0.0,
                              disable_tqdm=True, remove_unused_columns=False)
class Private(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return loss_of(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])
    def training_step(self, model, inputs, *_):
        opt.zero_grad(); loss = self.compute_loss(model.train(), inputs)
        loss.backward(); return loss.detach()
rate = torch.optim.lr_scheduler.LambdaLR(opt.original_optimizer, lambda n: 1.0)
Private(model, arguments, train_dataset=data, optimizers=(opt, rate)).train()
""",
    "Lightning": """
import pytorch_lightning as pl
class Task(pl.LightningModule):
    def __init__(self): super().__init__(); self.model, self.opt, self.loader = private(net())
    def training_step(self, batch, _): return loss_of(self.model(batch[0]), batch[1])
    def configure_optimizers(self): return self.opt
task = Task()
pl.Trainer(max_steps=6, accelerator="cpu", logger=False, enable_checkpointing=False,
           enable_progress_bar=False, enable_model_summary=False).fit(task, task.loader)
""",
}
QUICK = {
    "fused, half the noise",
    "fused, steps in parts, AdamW",
    "fused, the usual loop",
    "fused, parts of batches as large as examples are wide",
    "seed in the loop",
    "no noise on biases",
    "never clipped",
    "plain head",
    "buffer of inputs",
    "raw update after the step",
    "closure",
    "generator of a private discriminator",
    "two private models",
    "features beside logits",
    "rounds",
}
"""One script of each kind, for runs without slow tests."""
