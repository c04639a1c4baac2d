"""A mail server that keeps what it receives, for one test."""

import socketserver
import ssl
import threading
from dataclasses import dataclass, field

_ANSWERS = {"STARTTLS": "220 go on", "AUTH": "235 welcome", "QUIT": "221 bye"}


@dataclass
class Mail:
    """The content of one transaction."""

    sender: str = ""
    recipients: list[str] = field(default_factory=list)
    text: str = ""


class _Session(socketserver.StreamRequestHandler):
    server: "MailSink"
    timeout = 60

    def handle(self) -> None:
        self.encrypted = False
        self.say("220 sink ESMTP")
        mail = Mail()
        while line := self.rfile.readline():
            words = line.decode().strip()
            self.server.lines.append((words, self.encrypted))
            if not self.answer(words, mail):
                return

    def answer(self, words: str, mail: Mail) -> bool:
        """Answer one command; returns whether the session continues."""
        verb = words.split(" ", 1)[0].upper()
        refused = self.server.refuse.get(verb)
        if verb in self.server.hang:
            self.server.hung.set()
            self.server.released.wait(60)
            return False
        if refused:
            self.say(refused)
            return True
        if verb == "EHLO":
            more = ["250-STARTTLS"] if self.server.tls and not self.encrypted else []
            for text in ("250-sink", *more, "250-AUTH PLAIN LOGIN", "250 8BITMIME"):
                self.say(text)
        elif verb == "DATA":
            self.say("354 give")
            mail.text = self.data()
            self.server.mails.append(mail)
            self.say("250 taken")
        else:
            self.note(verb, words, mail)
            self.say(_ANSWERS.get(verb, "250 ok"))
        if verb == "STARTTLS":
            self.encrypt()
        return verb != "QUIT"

    def note(self, verb: str, words: str, mail: Mail) -> None:
        if verb == "MAIL":
            mail.sender = words.split("<", 1)[1].split(">", 1)[0]
        elif verb == "RCPT":
            mail.recipients.append(words.split("<", 1)[1].split(">", 1)[0])

    def data(self) -> str:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line.decode())
        return "".join(lines)

    def encrypt(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server.tls)
        try:
            self.request = context.wrap_socket(self.request, server_side=True)
        except ssl.SSLError:
            self.server.lines.append(("TLS REFUSED", False))
            raise
        self.rfile = self.request.makefile("rb")
        self.wfile = self.request.makefile("wb", buffering=0)
        self.encrypted = True

    def say(self, text: str) -> None:
        self.wfile.write(text.encode() + b"\r\n")

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            return
        finally:
            self.rfile.close()
            self.wfile.close()
            self.request.close()


class MailSink(socketserver.ThreadingTCPServer):
    """A real SMTP server on a free port of the loopback address.

    Attributes:
        mails: the accepted mails.
        lines: every line that it received, and whether it came encrypted.
        refuse: the answer to a verb that it refuses.
        hang: verbs it never answers, until ``released`` is set.
        tls: a file with key and certificate, to offer STARTTLS.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.mails: list[Mail] = []
        self.lines: list[tuple[str, bool]] = []
        self.refuse: dict[str, str] = {}
        self.hang: set[str] = set()
        self.hung, self.released = threading.Event(), threading.Event()
        self.tls = ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def place(self) -> str:
        """The server's address, in the form of ``notify.email.smtp``."""
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""

    def close(self) -> None:
        """Stop the server."""
        self.released.set()
        self.shutdown()
        self.server_close()
