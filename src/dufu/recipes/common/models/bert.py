"""A BERT of LiBai's default size: `get_config("common/models/bert.py").pretrain_model`; change its `cfg`."""

from dufu.config import LazyCall

cfg = dict(
    vocab_size=30522,
    hidden_size=768,
    hidden_layers=24,
    num_attention_heads=12,
    ffn_hidden_size=4096,
    max_seq_length=512,
    num_tokentypes=2,
    embedding_dropout_prob=0.1,
    attention_dropout_prob=0.1,
    output_dropout_prob=0.1,
    initializer_range=0.02,
    layernorm_epsilon=1e-5,
    apply_residual_post_layernorm=False,
)

pretrain_model = LazyCall("dufu.models.bert.Bert")(cfg=cfg)
classification_model = LazyCall("dufu.models.bert.BertClassifier")(cfg=dict(num_labels=2, **cfg))
