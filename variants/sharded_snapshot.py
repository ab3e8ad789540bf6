"""Save a sharded model in parts, while training goes on. Parent: variants/fsdp.py

torchrun --standalone --nproc-per-node=2 -m variants.sharded_snapshot 50 10
On each of two machines, type --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST in
place of --standalone. HOST is the name of one of the two, the same on both.
"""

import gc
import glob
import os
import shutil
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import utils  # its docstring explains the words: rank, DDP, backend, snapshot


def ddp_setup(device, timeout=timedelta(minutes=5)):  # torchrun's environ has the rest
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
        timeout=timeout,  # how long a rank waits for the others
        device_id=None if device.type == "cpu" else device,  # without it, NCCL guesses
    )


def blocks_of(model):
    """Your blocks go here, such as `[*model.layers]`: layers that compute in turn."""
    return [model[0], model[2]]


def shard(model, device):
    """Leave this rank its rows of each parameter. No device gets the whole model."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    count = len([*model.parameters()])
    for block in [*blocks_of(model), model]:  # the model takes what no block has taken
        block.to(device)
        for weight in block.parameters():
            if not isinstance(weight, DTensor):  # else a block before has it already
                dist.broadcast(weight.detach(), src=0)  # as DDP: all start as rank 0
        fully_shard(block, mesh=mesh)  # each is gathered on its own
    if len([*model.parameters()]) > count:  # a shared one became two: 2.11 trains both
        utils.error("blocks share a parameter: return one block that contains both")


def checksums(path):
    """Of the tensors in a snapshot, a zip file: only its table of contents is read."""
    files = zipfile.ZipFile(path).infolist() if os.path.exists(path) else []
    return str([file.CRC for file in files])


def complete_folders(path):
    """[(epochs, folder)] of the snapshots at `path`. DCP writes .metadata last."""
    found = []
    for metadata in glob.glob(f"{glob.escape(path)}.*.????????/.metadata"):
        folder = os.path.dirname(metadata)
        epochs = folder[len(path) + 1 : -9]  # before the mark of eight digits
        if epochs.isdecimal():
            found.append((int(epochs), folder))
    return found


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
        self.saving = None
        self._load_snapshot()
        self._load_parts()

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
        self._finish_saving()

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
        for buffer in self.model.buffers():  # as DDP does: training may read them
            dist.broadcast(buffer, src=0)
        output = self.model(source)  # FSDP's backward() averages the gradients, too
        loss = self.loss_fn(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ by rank: take 0's
            dist.broadcast(buffer, src=0)  # rank 0 sends
        most = max(utils.gather(len(self.eval_data)))  # batches of a rank
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            output = self.model(source)
            loss_sum += self.loss_fn(output, targets) * len(source)  # sizes may differ
        for _ in range(most - len(self.eval_data)):
            source, _ = self.eval_data.collate_fn([self.eval_data.dataset[0]])
            self.model(source)  # FSDP moves it; all ranks must gather equally often
        dist.all_reduce(loss_sum)  # adds up over ranks, in place; waits for every rank
        return loss_sum.item() / len(self.eval_data.dataset)

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _parts(self):
        """This rank's parts, by names that do not depend on the number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        names = [*model]
        return {"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer, "NAMES": names}

    def _save_snapshot(self):
        self._finish_saving()  # the last one
        mark = utils.gather(os.urandom(4).hex())[0]  # two runs must not share a folder
        self.next_folder = f"{self.snapshot_path}.{self.epochs_run}.{mark}"
        # It copies the parts, and writes them while the next steps change the weights.
        self.saving = dcp.async_save(
            self._parts(), checkpoint_id=self.next_folder, process_group=self.cpu_group
        )

    def _finish_saving(self):
        if self.saving:
            self.saving.result()  # waits until all ranks have written, or raises
            self.saving = None
            if not all(utils.gather(os.path.exists(f"{self.next_folder}/.metadata"))):
                utils.error(f"not every rank can see {self.next_folder}")
            if dist.get_rank() == 0:
                for folder in self.folders:
                    shutil.rmtree(folder)
            self.folders = [self.next_folder]
            self._print(f"saved to {self.next_folder}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path, mmap=True)
        # Without a shared disk, some machines have no snapshot, or an older one.
        epochs = utils.gather(snapshot["EPOCHS_RUN"] if snapshot else -1)  # -1: none
        newest = epochs.index(max(epochs))  # all load this rank's snapshot
        if len(set(epochs)) > 1:
            self._print(f"epochs saved, by rank: {epochs}. All take rank {newest}'s")
        if len(set(utils.gather(checksums(self.snapshot_path)))) > 1:
            snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        utils.keep_parts(snapshot, self.model, self.optimizer)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _load_parts(self):
        folders = utils.gather(complete_folders(self.snapshot_path))[0]  # rank 0's
        self.folders = [folder for _, folder in folders]  # to delete after a save
        epochs, newest = max(folders, default=(0, None))
        if epochs > self.epochs_run:
            parts = self._parts()  # DCP loads into tensors that are there
            names = parts["NAMES"]
            dcp.load(parts, checkpoint_id=newest)
            if parts["NAMES"] != names:
                utils.error(f"{newest} belongs to another model")
            saved = parts["OPTIMIZER_STATE"]
            utils.print_replaced(saved, self.optimizer.state_dict(), newest)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=parts["MODEL_STATE"],
                optim_state_dict=saved,
            )
            self.epochs_run = epochs


def load_train_objs():
    """Your data, model (on the CPU) and loss go here.

    A sample is (source, target). A batch has its samples along dimension 0, and the
    loss is their mean. A snapshot holds the model and the optimizer: keep all else that
    training changes inside the model.
    """
    utils.seed(0)  # the same weights in each run and on each rank
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    layers = torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    return train_set, eval_set, model, torch.nn.MSELoss()


def make_optimizer(model):
    """Your optimizer goes here, for all parameters. They are on the device by now."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


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
    shard(model, device)  # before the optimizer, which holds the parameters
    optimizer = make_optimizer(model)
    utils.check_optimizer(optimizer, model)
    utils.check_data(train_set, eval_set, args.batch_size)
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
    utils.forget_meshes(model)
    del model, optimizer  # or gloo's threads outlive main, and may abort the exit
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
