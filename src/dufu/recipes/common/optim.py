"""The `optim` section: AdamW with LiBai's defaults. The clip norm defaults to 1.0 (see get_default_optimizer_params)."""

from dufu.config import LazyCall

optim = LazyCall("dufu.optim.AdamW")(
    params=LazyCall("dufu.optim.get_default_optimizer_params")(
        clip_grad_norm_type=2.0,
        weight_decay_norm=0.0,
        weight_decay_bias=0.0,
    ),
    lr=1e-4,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
    do_bias_correction=True,
)
