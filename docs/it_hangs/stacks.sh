# Where each rank of this machine is: sh docs/it_hangs/stacks.sh PID_OF_TORCHRUN ...
for launcher; do
    for pid in $(pgrep -P "$launcher"); do
        tr '\0' '\n' < "/proc/$pid/environ" | grep '^RANK='
        py-spy dump --subprocesses --pid "$pid"
    done
done
