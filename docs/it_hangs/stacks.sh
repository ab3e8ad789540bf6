# Where each rank of this machine is: sh docs/it_hangs/stacks.sh PID_OF_TORCHRUN
for pid in $(pgrep -P "$1"); do
    tr '\0' '\n' < "/proc/$pid/environ" | grep '^RANK='
    py-spy dump --subprocesses --pid "$pid"
done
