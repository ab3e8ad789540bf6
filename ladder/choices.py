"""Which script a reader needs: questions in their order, for the page and its picture.

Each of `CHOICES` is (question, answers, how to go on). An answer is (what the reader
says, the script or page that serves). Who gives none of the answers goes on to the next
question, and from the last one to `AT_LAST`.
"""

FSDP = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"

CHOICES = [
    (
        "Does your code use one of these?",
        [
            ("nn.DataParallel", "variants/data_parallel.py"),
            ("NVIDIA Apex", "variants/mixed_precision.py"),
            ("options --nodes --gpus --nr", "variants/multinode_spawn.py"),
            ("torch.distributed.launch", "multinode.py"),
            ("Lightning", "variants/train_loop.py"),
        ],
        "no",
    ),
    (
        "Do the model and a batch fit into the memory of one device?",
        [
            ("the model does not", FSDP),
            ("the batch does not", "variants/gradient_accumulation.py"),
            ("barely, or too slow", "variants/mixed_precision.py"),
        ],
        "yes",
    ),
    (
        "How many devices do you have?",
        [("one", "single_gpu.py"), ("several in one machine", "multigpu.py")],
        "many machines",
    ),
    (
        "Can you start torchrun on every machine?",
        [("no", "variants/multinode_spawn.py")],
        "yes",
    ),
    (
        "May your job be stopped at any time?",
        [("yes", "variants/preemptible.py")],
        "no",
    ),
    (
        "Does the loss compare the samples of a batch with each other?",
        [("yes", "variants/ddp2.py")],
        "no",
    ),
    (
        "Is the network slow?",
        [("yes", "variants/gradient_accumulation.py")],
        "no",
    ),
    (
        "Do you want a schedule, clipping, accuracy or a log?",
        [("yes", "variants/real_job.py")],
        "no",
    ),
]
AT_LAST = "multinode.py"

# {script: (what it buys, what it costs, what it needs)}
WHAT_FOR = {
    "single_gpu.py": (
        "a script that you can compare all others with",
        "it uses one device",
        "nothing but PyTorch",
    ),
    "variants/data_parallel.py": (
        "several GPUs without a second process",
        "it copies the model to each GPU in each step, and one process drives all GPUs",
        "one machine with several GPUs",
    ),
    "multigpu.py": (
        "all devices of a machine, because each takes a share of the samples",
        "in each step, the processes exchange the gradients of the whole model",
        "one machine",
    ),
    "variants/gradient_accumulation.py": (
        "a larger batch than fits into the memory, or fewer messages on the network",
        "the parts of a batch run one after the other",
        "nothing more",
    ),
    "variants/mixed_precision.py": (
        "less memory for activations, and speed where the device computes fast in"
        " bfloat16 or float16",
        "less exact numbers; float16 also needs a scaler, and skips steps now and then",
        "a device that is fast in bfloat16 or float16",
    ),
    "variants/multinode_spawn.py": (
        "many machines without a launcher",
        "you type a command on each machine, and nothing restarts after a failure",
        "a port on the first machine that all others can reach",
    ),
    "multinode.py": (
        "many machines, and restarts after a failure",
        "you type a command on each machine, or let a scheduler do it",
        "torchrun, and a network between the machines",
    ),
    "variants/preemptible.py": (
        "a job that is told to end saves inside the epoch and resumes at the same step",
        "the processes exchange one more number in each step",
        "a scheduler that sends SIGTERM before it kills",
    ),
    "variants/real_job.py": (
        "a learning-rate schedule, clipping, accuracy, a log, and augmentation that a"
        " resumed run repeats",
        "four more processes for each rank, which load the data",
        "cores for the workers",
    ),
    "variants/ddp2.py": (
        "a loss over the samples of all processes of a machine",
        "the processes of a machine exchange their outputs in each step",
        "the same number of processes on each machine",
    ),
    "variants/train_loop.py": (
        "one `fit()` for most of this, which you can read to the last line",
        "your own script no longer shows what happens",
        "nothing more",
    ),
}


def chosen():
    """The scripts that the answers lead to."""
    targets = [target for _, answers, _ in CHOICES for _, target in answers]
    return {*targets, AT_LAST} - {FSDP}


def name_of(target):
    """How a script is called where there is little room."""
    return "FSDP (not here)" if target == FSDP else target.removeprefix("variants/")
