/*
 * lab-relay COMMAND [ARG...]: run COMMAND and carry its standard streams over
 * the lab's serial lines.
 *
 *   ttyS0 in   standard input, in blocks: two bytes of length (big endian),
 *              then the data; length 0 is the end of the input
 *   ttyS0 out  standard output
 *   ttyS1 out  standard error
 *   ttyS2 out  "start\n" before COMMAND runs, "exit N\n" when all output is out
 *
 * COMMAND gets pipes, never the terminals themselves: nothing is echoed or
 * turned into CR LF, and programs see that nobody watches.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

/*
 * After COMMAND's end, output of what it left running is taken until there is
 * none for a while, but not for ever.
 */
#define QUIET_MS 200
#define LINGER_SECONDS 2

static int open_line(const char *path)
{
	struct termios t;
	int fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);

	if (fd < 0 || tcgetattr(fd, &t) < 0) {
		perror(path);
		exit(71);
	}
	cfmakeraw(&t);
	t.c_cflag |= CLOCAL;
	tcsetattr(fd, TCSANOW, &t);
	return fd;
}

static void write_all(int fd, const char *data, size_t n)
{
	while (n) {
		ssize_t done = write(fd, data, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return;
		data += done;
		n -= (size_t)done;
	}
}

/* One step from FROM to TO; 0 when FROM is at its end. */
static int forward(int from, int to)
{
	static char buf[65536];
	ssize_t n = read(from, buf, sizeof(buf));

	if (n < 0)
		return errno == EINTR || errno == EAGAIN;
	write_all(to, buf, (size_t)n);
	return n > 0;
}

/* The state of the standard input's blocks. */
static struct {
	unsigned char head[2];
	size_t have;   /* header bytes read */
	size_t left;   /* data bytes still to come in this block */
	char data[4096];
	size_t from, to; /* data read but not yet taken by COMMAND */
	int pipe;      /* to COMMAND, or -1 when it takes no more */
} in;

static void end_input(void)
{
	if (in.pipe >= 0)
		close(in.pipe);
	in.pipe = -1;
}

/* Read what the line has: part of a header or part of a block. */
static void take_input(int line)
{
	ssize_t n;

	if (!in.left) {
		n = read(line, in.head + in.have, 2 - in.have);
		if (n <= 0)
			return;
		in.have += (size_t)n;
		if (in.have < 2)
			return;
		in.have = 0;
		in.left = (size_t)in.head[0] << 8 | in.head[1];
		if (!in.left)
			end_input();
		return;
	}
	n = read(line, in.data, in.left < sizeof(in.data) ? in.left : sizeof(in.data));
	if (n <= 0)
		return;
	in.left -= (size_t)n;
	in.from = 0;
	in.to = in.pipe < 0 ? 0 : (size_t)n;
}

static void give_input(void)
{
	ssize_t n = write(in.pipe, in.data + in.from, in.to - in.from);

	if (n > 0)
		in.from += (size_t)n;
	else if (n < 0 && errno != EINTR && errno != EAGAIN) {
		end_input();
		in.from = in.to = 0;
	}
}

static void on_child(int sig)
{
	(void)sig; /* only to interrupt poll() */
}

static pid_t start(char **argv, int *out, int *err)
{
	int i[2], o[2], e[2];
	pid_t pid;

	if (pipe2(i, O_CLOEXEC) || pipe2(o, O_CLOEXEC) || pipe2(e, O_CLOEXEC))
		exit(71);
	pid = fork();
	if (pid == 0) {
		sigset_t none;

		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		signal(SIGPIPE, SIG_DFL);
		setsid();
		dup2(i[0], 0);
		dup2(o[1], 1);
		dup2(e[1], 2);
		execvp(argv[0], argv);
		fprintf(stderr, "lab: %s: %s\n", argv[0], strerror(errno));
		_exit(errno == ENOENT ? 127 : 126);
	}
	close(i[0]);
	close(o[1]);
	close(e[1]);
	in.pipe = i[1];
	fcntl(in.pipe, F_SETFL, O_NONBLOCK);
	*out = o[0];
	*err = e[0];
	return pid;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_child };
	int line = open_line("/dev/ttyS0"), err_line = open_line("/dev/ttyS1");
	int control = open_line("/dev/ttyS2");
	int out, err, status = 0, running = 1;
	char text[32];
	sigset_t block, unblocked;
	struct timespec quiet = { 0, QUIET_MS * 1000000L };
	time_t ended = 0;
	pid_t pid;

	if (argc < 2)
		return 64;
	signal(SIGPIPE, SIG_IGN);
	/* SIGCHLD comes only while waiting in ppoll(), so none is missed. */
	sigemptyset(&block);
	sigaddset(&block, SIGCHLD);
	sigprocmask(SIG_BLOCK, &block, &unblocked);
	sigaction(SIGCHLD, &action, NULL);
	write_all(control, "start\n", 6);
	pid = start(argv + 1, &out, &err);

	while (running || out >= 0 || err >= 0) {
		int pending = in.to > in.from;
		struct pollfd p[4] = {
			{ .fd = out, .events = POLLIN },
			{ .fd = err, .events = POLLIN },
			{ .fd = running && !pending ? line : -1, .events = POLLIN },
			{ .fd = pending ? in.pipe : -1, .events = POLLOUT },
		};
		int n = ppoll(p, 4, running ? NULL : &quiet, &unblocked);

		if (n == 0 || (!running && time(NULL) > ended + LINGER_SECONDS))
			break;
		if (n < 0) /* SIGCHLD: look at the child, not at the streams */
			p[0].revents = p[1].revents = p[2].revents = p[3].revents = 0;
		if (p[0].revents && !forward(out, line))
			close(out), out = -1;
		if (p[1].revents && !forward(err, err_line))
			close(err), err = -1;
		if (p[2].revents)
			take_input(line);
		if (p[3].revents)
			give_input();
		if (running && waitpid(pid, &status, WNOHANG) == pid)
			running = 0, ended = time(NULL);
	}
	/* The last byte has left the line, and then only the status follows. */
	tcdrain(line);
	tcdrain(err_line);
	status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	snprintf(text, sizeof(text), "exit %d\n", status);
	write_all(control, text, strlen(text));
	tcdrain(control);
	return status;
}
