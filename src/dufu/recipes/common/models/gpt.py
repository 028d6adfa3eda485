"""A GPT-2 of LiBai's default size: `get_config("common/models/gpt.py").pretrain_model`; change its `cfg`."""

from dufu.config import LazyCall

cfg = dict(
    hidden_layers=6,
    vocab_size=30522,
    hidden_size=384,
    ffn_hidden_size=1536,
    num_attention_heads=12,
    max_seq_length=1024,
    embedding_dropout_prob=0.0,
    attention_dropout_prob=0.0,
    output_dropout_prob=0.0,
    layernorm_epsilon=1e-5,
    initializer_range=0.02,
    use_scaled_init_for_output_weights=True,
)

pretrain_model = LazyCall("dufu.models.gpt2.GPT2")(cfg=cfg)
