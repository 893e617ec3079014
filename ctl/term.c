/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The signal handlers restore the terminal themselves, since write() and tcsetattr() are
 * async-signal-safe. A signal therefore ends the process at once, even while a command
 * waits for a reply. The handler then raises the signal again with its default action, so
 * that the shell sees the right status.
 *
 * Keyboard signals stay enabled (ISIG): ^C and ^Z work as usual.
 */
#include "ctl/term.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "ctl/display.h"
#include "daemon/base/mem.h"

/* alternate screen, no cursor, no line wrap */
#define ENTER "\033[?1049h\033[?25l\033[?7l"
#define LEAVE "\033[0m\033[?7h\033[?25h\033[?1049l"
#define ESCAPE 0x1b

static const int ends[] = {SIGHUP,  SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGALRM,
			   SIGABRT, SIGBUS, SIGSEGV, SIGFPE,  SIGILL};

static struct {
	struct termios saved, raw;
	volatile sig_atomic_t open;
	bool colour;
} term;

static void term_put(const char *text, size_t len)
{
	while (len > 0) {
		ssize_t n = write(STDOUT_FILENO, text, len);

		if (n < 0 && errno != EINTR)
			return;
		if (n > 0) {
			text += n;
			len -= (size_t)n;
		}
	}
}

/* Blocks SIGTSTP while the terminal is changed. A fatal signal need not be blocked:
 * closing the terminal twice is harmless. */
static void term_hold(int how)
{
	sigset_t stop;

	sigemptyset(&stop);
	sigaddset(&stop, SIGTSTP);
	sigprocmask(how, &stop, NULL);
}

static void term_enter(void)
{
	term.open = 1;
	tcsetattr(STDIN_FILENO, TCSADRAIN, &term.raw);
	term_put(ENTER, strlen(ENTER));
}

static void term_leave(void)
{
	term_put(LEAVE, strlen(LEAVE));
	tcsetattr(STDIN_FILENO, TCSADRAIN, &term.saved);
	term.open = 0;
}

void term_close(void)
{
	if (!term.open)
		return;
	term_hold(SIG_BLOCK);
	term_leave();
	term_hold(SIG_UNBLOCK);
}

/* SA_RESETHAND: the raised signal has its default action. */
static void on_end(int sig)
{
	if (term.open)
		term_leave();
	raise(sig);
}

/* SIGTSTP is blocked while its handler runs. */
static void on_stop(int sig)
{
	int saved_errno = errno;
	bool was_open = term.open;

	(void)sig;
	if (was_open)
		term_leave();
	raise(SIGSTOP);
	if (was_open)
		term_enter();
	errno = saved_errno;
}

static void on_size(int sig)
{
	(void)sig; /* interrupts poll() */
}

bool term_usable(void)
{
	const char *kind = getenv("TERM");

	return isatty(STDIN_FILENO) && isatty(STDOUT_FILENO) && kind && *kind &&
	       strcmp(kind, "dumb") != 0;
}

int term_open(void)
{
	const char *no_colour = getenv("NO_COLOR");
	struct sigaction act = {.sa_handler = on_end, .sa_flags = (int)SA_RESETHAND};

	if (tcgetattr(STDIN_FILENO, &term.saved) < 0)
		return -errno;
	term.colour = !no_colour || !*no_colour;
	term.raw = term.saved;
	term.raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
	term.raw.c_iflag |= ICRNL;
	term.raw.c_cc[VMIN] = 0;
	term.raw.c_cc[VTIME] = 0;
	for (size_t i = 0; i < ARRAY_LEN(ends); i++)
		sigaction(ends[i], &act, NULL);
	act = (struct sigaction){.sa_handler = on_stop};
	sigaction(SIGTSTP, &act, NULL);
	act.sa_handler = on_size;
	sigaction(SIGWINCH, &act, NULL);
	atexit(term_close);
	term_hold(SIG_BLOCK);
	term_enter();
	term_hold(SIG_UNBLOCK);
	return 0;
}

void term_size(unsigned int *rows_p, unsigned int *columns_p)
{
	struct winsize size = {0};

	ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
	*rows_p = size.ws_row ? size.ws_row : 24;
	*columns_p = size.ws_col ? size.ws_col : 80;
}

static const char *look_begin(enum term_look look)
{
	if (!term.colour || look == TERM_PLAIN)
		return "";
	return look == TERM_HEAD ? "\033[7m" : "\033[31m";
}

void term_draw(const struct term_line *lines, size_t count)
{
	unsigned int rows, columns;
	char *text = NULL;
	size_t len;
	FILE *out = open_memstream(&text, &len);

	if (!out)
		return;
	term_size(&rows, &columns);
	fputs("\033[H", out);
	for (size_t i = 0; i < count && i < rows; i++) {
		const char *begin = look_begin(lines[i].look);

		fprintf(out, "%s%s%.*s%s\033[K", i ? "\r\n" : "", begin,
			(int)display_cut(lines[i].text, columns), lines[i].text,
			*begin ? "\033[0m" : "");
	}
	fputs("\033[J", out);
	fclose(out);
	if (text)
		term_put(text, len);
	free(text);
}

/* The length of a key's escape sequence: ESC [ … letter, ESC O letter. 0: none. */
static size_t key_sequence(const unsigned char *keys, size_t count)
{
	size_t n = 2;

	if (count < 2 || keys[0] != ESCAPE || (keys[1] != '[' && keys[1] != 'O'))
		return 0;
	while (n < count && (keys[n] < 0x40 || keys[n] > 0x7e))
		n++;
	return n < count ? n + 1 : count;
}

int term_key(int timeout_ms)
{
	struct pollfd fd = {.fd = STDIN_FILENO, .events = POLLIN};
	static unsigned char keys[64];
	static size_t count, at;
	ssize_t n;

	if (at == count) {
		at = count = 0;
		if (poll(&fd, 1, timeout_ms) <= 0)
			return TERM_KEY_NONE;
		n = read(STDIN_FILENO, keys, sizeof(keys));
		if (n <= 0)
			return (n < 0 && errno != EINTR && errno != EAGAIN) ||
					       fd.revents & (POLLHUP | POLLERR | POLLNVAL)
				       ? TERM_KEY_END
				       : TERM_KEY_NONE;
		count = (size_t)n;
	}
	n = (ssize_t)key_sequence(keys + at, count - at);
	at += (size_t)n;
	if (n)
		return TERM_KEY_NONE;
	return keys[at++];
}
