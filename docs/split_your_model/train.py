"""Train a split transformer. Parent: variants/tensor_parallel.py

torchrun --standalone --nproc-per-node=2 -m docs.split_your_model.train 4 2 --split 2
On each of two machines, type --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST in
place of --standalone. HOST is the name of one of the two, the same on both.
"""

import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, parallel
from torch.utils.data import DataLoader, TensorDataset

import utils  # its docstring explains the words: rank, DDP, backend, snapshot
from docs.split_your_model.after import PLAN, VOCABULARY, Model, TokenLoss


def ddp_setup(device, timeout=timedelta(minutes=5)):  # torchrun's environ has the rest
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
        timeout=timeout,  # how long a rank waits for the others
        device_id=None if device.type == "cpu" else device,  # without it, NCCL guesses
    )


def split_layers(model, device, split):
    """Leave this rank its part of PLAN's layers. Returns the ranks with the same part.

    The mesh has a row for each replica of the model, and a column for each part.
    """
    mesh = dist.init_device_mesh(
        device.type,
        (dist.get_world_size() // split, split),
        mesh_dim_names=("replica", "split"),
    )
    count = len([*model.parameters()])
    parallel.parallelize_module(model, mesh["split"], PLAN)
    if len([*model.parameters()]) > count:
        utils.error("layers of PLAN share a parameter, and would train two of it")
    model.to(device)  # the other layers, whole
    counterparts = mesh.get_group("replica")
    for weight in model.parameters():
        if isinstance(weight, DTensor):  # cut by the first rank of each replica
            dist.broadcast(weight.detach().to_local(), group=counterparts, group_src=0)
        else:
            dist.broadcast(weight.detach(), src=0)  # as under DDP, all start as rank 0
    return counterparts


def average_gradients(model, group):
    """Over `group`, the ranks with the same part, or over all, as DDP does."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad, ranks = parameter.grad, None  # all, if this one has the whole weight
            if isinstance(parameter, DTensor):
                ranks = group if parameter.placements[0].is_shard() else None
                grad = grad.to_local()
            dist.all_reduce(grad, dist.ReduceOp.AVG, ranks)


def clip_grad_norm_(model, max_norm):
    """As torch's, which fails where some weights are cut and others are whole."""
    groups = {}  # {mesh, or None for whole weights: [weight]}
    for weight in model.parameters():
        if weight.grad is not None:
            mesh = getattr(weight, "device_mesh", None)
            groups.setdefault(mesh, []).append(weight)
    norms = []
    for weights in groups.values():
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.stack(norms).norm()  # of all gradients
    for weights in groups.values():
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


def make_data(size, seed):
    """Sample i counts up from somewhere, in steps of its own, modulo VOCABULARY."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (size, 1), generator=generator)
    step = torch.randint(1, 6, (size, 1), generator=generator)
    tokens = (first + step * torch.arange(17)) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        counterparts: dist.ProcessGroup,
        save_every: int,
        snapshot_path: str,
    ):
        self.device = device
        self.counterparts = counterparts  # the ranks with the same part
        self.model = model
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self._load_snapshot()

    def train(self, total_epochs):
        self._print(utils.describe_run(self.train_data, self.eval_data, self.device))
        self._print(utils.progress(self.epochs_run, total_epochs, self.snapshot_path))
        for epoch in range(self.epochs_run, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch)
            samples_per_s = len(self.train_data.dataset) / (time.perf_counter() - start)
            held_out_loss = self._evaluate()
            self.epochs_run = epoch + 1
            self._print(
                f"epoch {self.epochs_run}/{total_epochs} | train loss {train_loss:.6f}"
                f" | held-out loss {held_out_loss:.6f} | {samples_per_s:,.0f} samples/s"
            )
            # Ends the run at NaN, which must not be saved.
            losses = train_loss, held_out_loss
            utils.check_state(losses, self.model, self.snapshot_path)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        sampler = self.train_data.sampler  # ranks of a replica draw the same numbers
        utils.seed(epoch * sampler.num_replicas + sampler.rank)
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.train_data:
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # averages over ranks, in place
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / len(self.train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        for buffer in self.model.buffers():  # as DDP does: training may read them
            dist.broadcast(buffer, src=0)
        output = self.model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        average_gradients(self.model, self.counterparts)
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ by rank: take 0's
            dist.broadcast(buffer, src=0)  # rank 0 sends
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            output = self.model(source)
            loss_sum += self.loss_fn(output, targets) * len(source)  # sizes may differ
        dist.all_reduce(loss_sum, group=self.counterparts)  # each replica once
        return loss_sum.item() / len(self.eval_data.dataset)

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
        }
        snapshot = utils.join_parts(snapshot)  # all ranks take part
        if dist.get_rank() == 0:  # one rank writes
            utils.save_atomically(snapshot, self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        # Without a shared disk, some machines have no snapshot, or an older one.
        epochs = utils.gather(snapshot["EPOCHS_RUN"] if snapshot else -1)  # -1: none
        newest = epochs.index(max(epochs))  # all load this rank's snapshot
        if len(set(epochs)) > 1:
            self._print(f"epochs saved, by rank: {epochs}. All take rank {newest}'s")
        if max(epochs) >= 0:  # a rank has one; files of equal epochs may differ
            snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        utils.keep_parts(snapshot, self.model, self.optimizer)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]


def load_train_objs():
    """Your data, model (on the CPU) and loss go here.

    A sample is (source, target). A batch has its samples along dimension 0, and the
    loss is their mean. A snapshot holds the model and the optimizer: keep all else that
    training changes inside the model.
    """
    utils.seed(0)  # the same weights in each run and on each rank
    train_set = make_data(2048, seed=0)
    eval_set = make_data(512, seed=1)
    return train_set, eval_set, Model(), TokenLoss()


def make_optimizer(model):
    """Your optimizer goes here, for all parameters. They are on the device by now."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=device.type == "cuda",  # unpinned, each copy makes the CPU wait
    )


@record  # else torchrun shows no traceback
def main(args):
    rank, local_rank, world_size = utils.torchrun_env()  # local: on its machine
    if world_size % args.split:
        utils.error(f"--split {args.split} does not divide {world_size} ranks")
    replica = rank // args.split
    replicas = world_size // args.split
    train_set, eval_set, model, loss_fn = load_train_objs()
    device = utils.set_device(args.device, local_rank)  # torchrun limits CPU threads
    ddp_setup(device)
    counterparts = split_layers(model, device, args.split)  # before the optimizer
    optimizer = make_optimizer(model)
    utils.check_optimizer(optimizer, model)
    utils.check_data(train_set, eval_set, args.batch_size / args.split)
    # Whole batches only, so that every step averages over equally many samples.
    sampler = torch.utils.data.DistributedSampler(
        train_set, num_replicas=replicas, rank=replica, drop_last=True
    )
    train_data = prepare_dataloader(
        train_set, args.batch_size, sampler, device, drop_last=True
    )
    sampler = range(replica, len(eval_set), replicas)  # each sample once
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    trainer = Trainer(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=train_data,
        eval_data=eval_data,
        device=device,
        counterparts=counterparts,
        save_every=args.save_every,
        snapshot_path=args.snapshot_path,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    utils.forget_meshes(model)
    gc.collect()  # or gloo's threads outlive main, and may abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument(
        "--split",
        type=utils.positive_int,
        default=1,
        help="ranks that share a layer",
    )
    args = parser.parse_args()
    main(args)
