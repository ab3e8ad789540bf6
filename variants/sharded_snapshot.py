"""Save a sharded model in parts, while training goes on. Parent: variants/fsdp.py

torchrun --standalone --nproc-per-node=2 -m variants.sharded_snapshot 50 10
On each of two machines, type --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST in
place of --standalone. HOST is the name of one of the two, the same on both.
"""

import gc
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

import utils  # its docstring explains the words: rank, DDP, backend, snapshot


def ddp_setup(device, timeout=timedelta(minutes=5)):  # torchrun's environ has the rest
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
        timeout=timeout,  # how long a rank waits for the others
        device_id=None if device.type == "cpu" else device,  # without it, NCCL guesses
    )


def blocks_of(module, is_block=False):
    """Modules that repeat, in a list or not. FSDP gathers one as its forward begins."""
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    has_forward = type(module).forward is not torch.nn.Module.forward
    if is_block and has_forward and not is_list:
        return [module] if [*module.parameters()] else []
    classes = [type(child) for child in module.children()]
    blocks = []
    for child in module.children():
        has_lists = any(
            isinstance(part, torch.nn.ModuleList) for part in child.modules()
        )
        has_parts = next(child.children(), None) is not None
        alike = classes.count(type(child)) > 1 and has_parts and not has_lists
        blocks += blocks_of(child, is_list or alike)
    return blocks


def shard(model, mesh, *optimizers, **options):
    """Leave this rank a part of each parameter, and of its state in the optimizers.

    mesh: of the ranks that share the model. options: those of `fully_shard`.
    """
    parts = {}  # {parameter: this rank's part of it}
    blocks = dict.fromkeys(blocks_of(model))  # each one once
    layers = [module for module in model.modules() if [*module.parameters(False)]]
    if len(layers) > 2 and not blocks:
        utils.error(f"blocks_of finds none of {len(layers)} layers: return them there")
    sizes = []  # parameters of each block, and those that are in none
    for block in [*blocks, model]:  # the model takes the rest
        whole = {}  # what no block before has taken
        for name, parameter in block.named_parameters():
            if not isinstance(parameter, DTensor):
                whole[name] = parameter
        check_parameters(whole, parts)
        sizes.append(sum(map(torch.numel, whole.values())))
        for tensor in [*whole.values(), *block.buffers()]:
            tensor.data = tensor.data.to(mesh.device_type).contiguous()
            dist.broadcast(tensor.data, src=0)  # as under DDP, all start from rank 0's
        fully_shard(block, mesh=mesh, **options)  # each is gathered on its own
        for name, parameter in whole.items():
            parts[parameter] = block.get_parameter(name)
            # Or the device would hold the whole model. Who has kept it gets NaN.
            parameter.data = torch.full((1,), torch.nan)
    for optimizer in optimizers:
        replace_parameters(optimizer, parts, mesh)
    if dist.get_rank() == 0:
        *of_blocks, rest = sizes
        largest = max(of_blocks, default=0)
        print(f"{len(of_blocks)} blocks, {largest:,} parameters at most, {rest:,} else")


def check_parameters(whole, parts):
    """End with one line if FSDP2 refuses a block's {name: parameter}."""
    dtypes = {tensor.dtype for tensor in whole.values() if tensor.requires_grad}
    odd = []
    for name, parameter in whole.items():
        if parameter in parts or parameter.ndim == 0 or parameter.numel() == 0:
            odd.append(name)
    if len(dtypes) > 1 or odd:
        utils.error(f"FSDP2 refuses {odd or dtypes}: scalar, empty, shared, mixed")


def replace_parameters(optimizer, parts, mesh):
    """The optimizer goes on with `parts`: {parameter: this rank's part of it}.

    Its state and options are rank 0's, as the weights are.
    """
    for parameter, state in optimizer.state.items():  # a snapshot's, or Adagrad's first
        part = parts[parameter]
        for name, value in state.items():
            if getattr(value, "shape", None) == part.shape:
                state[name] = distribute_tensor(value, mesh, part.placements)
            else:  # such as a count of steps
                state[name] = utils.gather(value)[0]
    state = optimizer.state_dict()  # by number, so that it fits the new ones
    state["param_groups"] = utils.gather(state["param_groups"])[0]  # such as rates
    for group in optimizer.param_groups:  # or it would train the old parameters
        group["params"][:] = [parts[parameter] for parameter in group["params"]]
    utils.load_optimizer(optimizer, state)


def gather(value):
    """`value` with the sharded tensors in it whole, on rank 0."""
    if isinstance(value, dict):
        return {name: gather(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(gather, value))
    if isinstance(value, DTensor):
        whole = value.full_tensor()  # all ranks take part
        return whole.to("cpu" if dist.get_rank() == 0 else "meta")
    return value


def parts_of(model, optimizer):
    """This rank's parts, by names that do not depend on the number of ranks."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"MODEL_STATE": model_state, "OPTIMIZER_STATE": optimizer_state}


def save_parts(model, optimizer, folder, group):
    """Copy this rank's parts; they are written while the next steps change them."""
    parts = parts_of(model, optimizer)
    return dcp.async_save(parts, checkpoint_id=folder, process_group=group)


def load_parts(model, optimizer, folder):
    """Fill in the rows that this rank holds now, whichever rank has written them."""
    frozen = []  # now, but not when it was saved: DCP would leave their state out
    try:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, weight in model.named_parameters():
            state = f"OPTIMIZER_STATE.state.{name}."
            was_trained = any(key.startswith(state) for key in saved)
            if was_trained and not weight.requires_grad:
                frozen.append(weight.requires_grad_())
        parts = parts_of(model, optimizer)  # DCP loads into tensors that are there
        dcp.load(parts, checkpoint_id=folder)
    except (Exception, dcp.CheckpointException) as reason:  # which is no Exception
        last_line = str(reason).splitlines()[-1]
        utils.error(f"cannot load {folder}: {last_line}")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=parts["MODEL_STATE"],
        optim_state_dict=parts["OPTIMIZER_STATE"],
    )
    states = parts["OPTIMIZER_STATE"]["state"]
    for name, weight in model.named_parameters():
        if name in states:  # in the dtype as saved, as utils.load_optimizer does
            optimizer.state[weight] = states[name]
    for weight in frozen:
        weight.requires_grad_(False)


def shapes_of(model, optimizer):
    """What utils.check_snapshot compares, without the weights."""
    shapes = dict.fromkeys(model.state_dict())  # the names count, too
    for name, weight in model.named_parameters():
        shapes[name] = torch.empty(weight.shape, device="meta")
    groups = optimizer.state_dict()["param_groups"]
    return {"MODEL_STATE": shapes, "OPTIMIZER_STATE": {"param_groups": groups}}


def folder_of(snapshot, path):
    """The folder that the snapshot at `path` names, which the next save removes."""
    name = snapshot["FOLDER"]
    if not re.fullmatch(r"[^/\\]+\.\d+\.[0-9a-f]{8}", name):  # beside it, and ours
        utils.error(f"{path} names a folder that no script of ours has written: {name}")
    return os.path.join(os.path.dirname(os.path.realpath(path)), name)


def commit(snapshot, path, written, old_folder, say):
    """Once all ranks have written, replace the file that names the folder."""
    written.result()
    if dist.get_rank() == 0:  # one rank writes the file
        utils.save_atomically(snapshot, path)
        if old_folder.startswith(f"{os.path.realpath(path)}."):  # no other file's
            shutil.rmtree(old_folder, ignore_errors=True)
    say(f"epoch {snapshot['EPOCHS_RUN']} saved to {path}")


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        save_every: int,
        snapshot_path: str,
    ):
        name = type(optimizer).__name__
        if name in ("Adafactor", "Muon", "Rprop"):
            utils.error(f"{name} needs whole parameters")
        self.device = device
        self.model = model
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.cpu_group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self.thread = ThreadPoolExecutor()
        self.folder = ""  # the last snapshot's; none yet
        self.saving = self.thread.submit(lambda: None)  # nothing to wait for yet
        self._load_snapshot()
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        shard(model, mesh, optimizer)  # moves block by block: no device holds the whole
        if self.folder:
            load_parts(model, optimizer, self.folder)

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
            utils.check_weights(losses, self.model, self.epochs_run, self.snapshot_path)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()
        self.saving.result()

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        utils.seed(epoch * dist.get_world_size() + dist.get_rank())  # per rank
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
        output = self.model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        for param in self.model.parameters():
            # FSDP gives a part of the gradient. If it has not seen the outputs, because
            # forward hides them in an object, the gradient stays whole, and is lost.
            if param.requires_grad and not isinstance(param.grad, DTensor):
                raise RuntimeError("a parameter has no gradient: do all ranks use it?")
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ by rank: take 0's
            dist.broadcast(buffer, src=0)  # rank 0 sends
        batches = torch.tensor(len(self.eval_data), device=self.device)
        dist.all_reduce(batches, dist.ReduceOp.MAX)
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            output = self.model(source)
            loss_sum += self.loss_fn(output, targets) * len(source)  # sizes may differ
        for _ in range(batches.item() - len(self.eval_data)):
            sample = self.eval_data.dataset[0]
            source, _ = self.eval_data.collate_fn([sample])
            self.model(source.to(self.device))  # all ranks must gather equally often
        dist.all_reduce(loss_sum)  # adds up over ranks, in place; waits for every rank
        return loss_sum.item() / len(self.eval_data.dataset)

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _save_snapshot(self):
        self.saving.result()  # wait for the last one, and raise its error
        mark = [os.urandom(4).hex()]  # two runs must not write into one folder
        dist.broadcast_object_list(mark)
        path = os.path.realpath(self.snapshot_path)
        folder = f"{path}.{self.epochs_run}.{mark[0]}"
        if dist.get_rank() == 0:
            os.mkdir(folder)
        dist.barrier()
        if not os.path.isdir(folder):
            utils.error(f"rank 0 writes to {folder}, which this rank does not see")
        written = save_parts(self.model, self.optimizer, folder, self.cpu_group)
        snapshot = {
            "MODEL_STATE": {},  # so that other scripts refuse this file
            "OPTIMIZER_STATE": {},
            "EPOCHS_RUN": self.epochs_run,
            "SHAPES": shapes_of(self.model, self.optimizer),
            "FOLDER": os.path.basename(folder),  # beside this file
        }
        snapshot = gather(snapshot)  # all ranks take part
        self.saving = self.thread.submit(
            commit, snapshot, self.snapshot_path, written, self.folder, self._print
        )
        self.folder = folder

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path, mmap=True)
        # Without a shared disk, some machines have no snapshot, or an older one.
        epochs = utils.gather(snapshot["EPOCHS_RUN"] if snapshot else -1)  # -1: none
        newest = epochs.index(max(epochs))  # all load this rank's snapshot
        if len(set(epochs)) > 1:
            self._print(f"epochs saved, by rank: {epochs}. All take rank {newest}'s")
            snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        if "FOLDER" in snapshot:
            self.folder = folder_of(snapshot, self.snapshot_path)
            snapshot |= snapshot["SHAPES"]  # check_snapshot compares them
            snapshot["OPTIMIZER_STATE"]["state"] = self.optimizer.state_dict()["state"]
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        if not self.folder:
            self.model.load_state_dict(snapshot["MODEL_STATE"])
        utils.load_optimizer(self.optimizer, snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]


def load_train_objs():
    """Your data, model (on the CPU) and loss go here.

    A sample is (source, target). A batch has its samples along dimension 0, and the
    loss is their mean. A snapshot holds the model and the optimizer: keep all else that
    training changes inside the model.
    """
    utils.seed(0)  # the same weights in each run and on each rank
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    model = torch.nn.Linear(20, 1)
    return train_set, eval_set, model, torch.nn.MSELoss()


def make_optimizer(model):
    """Your optimizer goes here, for all parameters. They are on the device by now."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


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
    train_set, eval_set, model, loss_fn = load_train_objs()
    device = utils.set_device(args.device, local_rank)  # torchrun limits CPU threads
    ddp_setup(device)
    optimizer = make_optimizer(model)
    utils.check_objects(train_set, eval_set, model, optimizer, args.batch_size)
    # Whole batches only, so that every step averages over equally many samples.
    sampler = torch.utils.data.DistributedSampler(train_set, drop_last=True)  # shuffles
    train_data = prepare_dataloader(
        train_set, args.batch_size, sampler, device, drop_last=True
    )
    sampler = range(rank, len(eval_set), world_size)  # each sample once
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    trainer = Trainer(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=train_data,
        eval_data=eval_data,
        device=device,
        save_every=args.save_every,
        snapshot_path=args.snapshot_path,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    # PyTorch's caches keep the mesh, and the mesh keeps the process group. PyTorch has
    # no call that frees it.
    mesh = next(model.parameters()).device_mesh
    vars(mesh).clear()
    del model, optimizer  # or gloo's threads outlive main, and may abort the exit
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
