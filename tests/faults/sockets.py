"""Two hosts speak to each other: `python sockets.py WHAT`.

listen              say this host's name to each who connects, and never hang up
ask NAME SECONDS    print what the listener at NAME says, if it answers in time
stay NAME           the same, and then wait for what comes next, and print that
receive COUNT       print how many seconds each of COUNT times 4 MiB took to come
send NAME           send those 4 MiB once
"""

import socket
import sys
import time

PORT = 5000


def listen():
    server = socket.create_server(("0.0.0.0", PORT))
    print("ready", flush=True)
    connections = []  # a connection that nobody refers to would be closed
    while True:
        connection, _ = server.accept()
        connection.sendall(socket.gethostname().encode())
        connections.append(connection)


def ask(name, seconds):
    with socket.create_connection((name, PORT), timeout=float(seconds)) as connection:
        print(connection.recv(99).decode())


def stay(name):
    with socket.create_connection((name, PORT)) as connection:
        print("connected to", connection.recv(99).decode(), flush=True)
        print("then came", connection.recv(99), flush=True)


def receive(count):
    server = socket.create_server(("0.0.0.0", PORT))
    print("ready", flush=True)
    for _ in range(int(count)):
        connection, _ = server.accept()
        start = time.monotonic()
        while connection.recv(1 << 20):
            pass
        print(f"took {time.monotonic() - start} s", flush=True)
        connection.close()


def send(name):
    with socket.create_connection((name, PORT)) as connection:
        connection.sendall(bytes(4 << 20))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until all has come


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    programs = {
        "listen": listen,
        "ask": ask,
        "stay": stay,
        "receive": receive,
        "send": send,
    }
    programs[what](*arguments)
