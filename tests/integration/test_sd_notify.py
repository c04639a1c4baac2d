"""The channels of notifications, with real programs, a real mail server and apprise itself."""

import base64
import email
import email.policy
import http.server
import json
import os
import select
import subprocess
import threading
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from fakes.mail import MailSink

from snaporch.config import EmailOptions, NotifyOptions
from snaporch.notify.channels import NotifyError, by_apprise, by_command, by_email, open_channels
from snaporch.notify.notification import Notification

EVENT = Notification(
    kind="failure",
    host="host",
    at=datetime(2026, 6, 10, 12, 30, tzinfo=UTC),
    domain="wéb 1",
    uuid="u",
    policy="hourly",
    status=5,
    level="",
    text="no agent answers",
    notes=("first",),
)
PASSWORD = "correct horse"


@pytest.fixture
def script(tmp_path):
    """Makes a shell script, as an admin would write it."""

    def make(text):
        path = tmp_path / "notify"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def sink():
    made = MailSink()
    yield made
    made.close()


@pytest.fixture
def password(tmp_path):
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    path.chmod(0o600)
    return str(path)


# -- programs ------------------------------------------------------------------------------------


def test_a_program_gets_json_and_an_environment(script, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/sd_notify")
    by_command(EVENT, script(f"cat > {tmp_path}/in; env > {tmp_path}/env; echo talk"), 60)
    assert json.loads((tmp_path / "in").read_text()) == EVENT.as_json()
    environment = (tmp_path / "env").read_text().splitlines()
    for line in (
        "SNAPORCH_EVENT=failure",
        "SNAPORCH_DOMAIN=wéb 1",
        "SNAPORCH_POLICY=hourly",
        "SNAPORCH_STATUS=5",
        "SNAPORCH_LEVEL=",
        "SNAPORCH_TEXT=no agent answers",
        "SNAPORCH_TITLE=snaporch on host: failure: wéb 1 (hourly)",
    ):
        assert line in environment
    assert not any(line.startswith("NOTIFY_SOCKET") for line in environment)


def test_a_program_that_fails_is_reported_with_its_last_line(script):
    with pytest.raises(NotifyError, match=r"status 3: no \\x1bnet$"):
        by_command(EVENT, script("cat >/dev/null; printf 'a\\nno \\033net\\n\\n' >&2; exit 3"), 60)


def test_a_program_that_is_killed_has_sent_nothing(script):
    with pytest.raises(NotifyError, match="exited with status -9"):
        by_command(EVENT, script("kill -9 $$"), 60)


def test_a_program_that_reads_nothing_is_fine(script):
    by_command(EVENT, script("exit 0"), 60)


def has_ended(pid):
    """Wait for the end: a killed process is removed when it next gets a processor."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            return bool(select.select([handle], [], [], 60)[0])
        finally:
            os.close(handle)
    return True


def test_a_program_that_hangs_is_killed_with_all_it_started(script, tmp_path):
    new, child = tmp_path / "child.new", tmp_path / "child"
    path = script(f"sleep 600 & echo $! > {new}; mv {new} {child}; wait")
    with pytest.raises(NotifyError, match="did not end within 5 s"):
        by_command(EVENT, path, 5)
    assert has_ended(int(child.read_text()))


def test_a_program_that_is_not_there():
    with pytest.raises(NotifyError, match="cannot be started: No such file"):
        by_command(EVENT, "/nonexistent/notify", 60)


# -- e-mail --------------------------------------------------------------------------------------


def test_a_mail_arrives(sink):
    by_email(EVENT, EmailOptions(to=("a@example.org", "b@example.org"), sender="s@example.org",
                          smtp=sink.place), 60)  # fmt: skip
    (mail,) = sink.mails
    assert (mail.sender, mail.recipients) == ("s@example.org", ["a@example.org", "b@example.org"])
    message = email.message_from_string(mail.text, policy=email.policy.default)
    assert message["Subject"] == "snaporch on host: failure: wéb 1 (hourly)"
    assert message["Auto-Submitted"] == "auto-generated"
    assert message["Message-ID"].endswith("@example.org>")
    assert message.get_content().replace("\r", "").startswith("no agent answers\nfirst\n\nhost ")


def test_without_a_sender_it_is_the_hosts_root(sink):
    by_email(EVENT, EmailOptions(to=("a@example.org",), smtp=sink.place), 60)
    assert sink.mails[0].sender.startswith("root@")


def test_a_server_that_refuses_is_reported(sink):
    settings = EmailOptions(to=("a@example.org",), sender="s@example.org", smtp=sink.place)
    sink.refuse = {"RCPT": "550 who?"}
    with pytest.raises(NotifyError, match=r"refused a@example\.org"):
        by_email(EVENT, settings, 60)
    sink.refuse = {"MAIL": "451 later"}
    with pytest.raises(NotifyError, match="answered 451 later"):
        by_email(EVENT, settings, 60)


def test_a_server_that_never_answers_times_out(sink):
    sink.hang = {"DATA"}
    with pytest.raises(NotifyError, match="timed out"):
        by_email(EVENT, EmailOptions(to=("a@example.org",), sender="s@e", smtp=sink.place), 1)
    assert sink.hung.is_set()


def test_a_server_that_is_not_there(sink):
    place = sink.place
    sink.close()
    with pytest.raises(NotifyError, match="Connection refused"):
        by_email(EVENT, EmailOptions(to=("a@example.org",), sender="s@e", smtp=place), 60)


def encrypted(sink, password, **more):
    place = sink.place.replace("127.0.0.1", "localhost")
    return EmailOptions(
        to=("a@example.org",), sender="s@example.org", smtp=place,
        user="me", password_file=password, **{"encryption": "starttls", **more},
    )  # fmt: skip


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "both.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [*words.split(), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "cert.pem").read_text())
    return path


def test_a_password_is_sent_over_an_encrypted_connection_only(
    sink, password, certificate, monkeypatch
):
    sink.tls = str(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    by_email(EVENT, encrypted(sink, password), 60)
    (login,) = [line for line in sink.lines if line[0].startswith("AUTH")]
    expected = base64.b64encode(f"\0me\0{PASSWORD}".encode()).decode()
    assert login == (f"AUTH PLAIN {expected}", True)
    assert len(sink.mails) == 1


def test_a_server_with_an_untrusted_certificate_gets_no_password(
    sink, password, certificate, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    sink.tls = str(certificate)
    with pytest.raises(NotifyError, match="certificate verify failed"):
        by_email(EVENT, encrypted(sink, password), 60)
    assert not any(line.startswith("AUTH") for line, _ in sink.lines)
    assert sink.mails == []


def test_a_server_without_encryption_gets_no_password(sink, password):
    with pytest.raises(NotifyError, match="STARTTLS extension not supported"):
        by_email(EVENT, encrypted(sink, password), 60)
    assert not any(line.startswith("AUTH") for line, _ in sink.lines)


def test_a_refused_password_is_in_no_message(sink, password, certificate, monkeypatch):
    sink.tls = str(certificate)
    sink.refuse = {"AUTH": "535 bad credentials"}
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(NotifyError) as caught:
        by_email(EVENT, encrypted(sink, password), 60)
    assert "535 bad credentials" in caught.value.line()
    assert PASSWORD not in caught.value.line()


def test_a_password_others_can_read_is_not_used(sink, password, tmp_path):
    (tmp_path / "password").chmod(0o640)
    with pytest.raises(NotifyError, match="other users can read it; run: chmod 600"):
        by_email(EVENT, encrypted(sink, password, encryption="none"), 60)


def test_a_sendmail_gets_recipients_and_the_mail(script, tmp_path):
    path = script(f'echo "$@" > {tmp_path}/words; cat > {tmp_path}/mail')
    by_email(EVENT, EmailOptions(to=("a@e", "b@e"), sender="s@e", smtp=path), 60)
    assert (tmp_path / "words").read_text() == "-i -f s@e -- a@e b@e\n"
    assert "no agent answers" in (tmp_path / "mail").read_text()
    with pytest.raises(NotifyError, match="exited with status 75"):
        by_email(EVENT, EmailOptions(to=("a@e",), sender="s@e", smtp=script("exit 75")), 60)


# -- apprise -------------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    """An HTTP server, and the bodies that were posted to it."""
    posted = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if "good" in self.path else 500)
            self.end_headers()

        def log_message(self, *_):
            """Print no log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.posted = posted
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def urls(tmp_path, receiver):
    """A configuration file of apprise with an URL of the receiver."""

    def write(place):
        path = tmp_path / "apprise"
        path.write_text(f"json://user:secret@127.0.0.1:{receiver.server_address[1]}/{place}\n")
        path.chmod(0o600)
        return path

    return write


OLD_MODULES = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


@OLD_MODULES
def test_apprise_posts_it(urls, receiver):
    by_apprise(EVENT, urls("good"))
    (document,) = receiver.posted
    assert document["title"] == "snaporch on host: failure: wéb 1 (hourly)"
    assert document["message"].startswith("no agent answers")


@OLD_MODULES
def test_apprise_that_fails_is_reported_without_its_url(urls, capfd, caplog):
    with pytest.raises(NotifyError) as caught:
        by_apprise(EVENT, urls("bad"))
    captured = capfd.readouterr()
    assert "could not reach all of its URLs" in caught.value.line()
    assert "secret" not in caught.value.line() + captured.out + captured.err + caplog.text


def test_apprise_with_an_invalid_file_is_an_error(tmp_path, urls):
    with pytest.raises(NotifyError, match="No such file"):
        by_apprise(EVENT, tmp_path / "none")
    path = urls("good")
    path.chmod(0o644)
    with pytest.raises(NotifyError, match="other users can read it"):
        by_apprise(EVENT, path)
    path.chmod(0o600)
    path.write_text("# nothing yet\n")
    with pytest.raises(NotifyError, match="has no URL"):
        by_apprise(EVENT, path)


def test_without_apprise_the_error_names_the_package_to_install(urls, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    with pytest.raises(NotifyError, match="is not installed; apt install apprise"):
        by_apprise(EVENT, urls("good"))


def test_channels_are_those_that_are_configured():
    assert open_channels(NotifyOptions()) == {}
    every = NotifyOptions(command="/bin/true", apprise="/etc/a", email=EmailOptions(to=("root",)))
    assert list(open_channels(every)) == ["notify.command", "notify.email", "notify.apprise"]
