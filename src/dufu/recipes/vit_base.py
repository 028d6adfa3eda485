"""ViT-Base, patches of 16 in pictures of 224, trained on ImageNet as DeiT's authors do (Touvron et al., 2020), without distillation."""

from dufu.config import LazyCall, get_config
from dufu.models.vit.sizes import SIZES

train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.vit.VisionTransformer")(
    cfg=dict(**SIZES["vit_base_patch16_224"], drop_path_rate=0.1, label_smoothing=0.1)
)
dataloader.dataset = LazyCall("dufu.data.PictureDataset")(
    crop="random_resized", rand_augment=2, rand_augment_magnitude=9.0, erase=0.25, mixup=0.8, cutmix=1.0
)
dataloader.split = [1.0, 0.0, 0.0]

optim.lr = 1e-3
optim.weight_decay = 0.05
optim.params.overrides = {"class_token": {"weight_decay": 0.0}, "position": {"weight_decay": 0.0}}
train.output_dir = "./output/vit_base"
train.amp.enabled = True
train.train_micro_batch_size = None
train.global_batch_size = 1024
train.train_epoch = 300
train.train_iter = 0
train.warmup_ratio = 5 / 300
train.log_period = 50
train.evaluation.eval_metric = "accuracy@1"
train.evaluation.eval_after_n_epoch = 1
train.evaluation.eval_iter = 1_000_000
train.checkpointer.save_model_after_n_epoch = 1
