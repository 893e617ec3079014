/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Links with config structs made by hand, a folder for key files, and
 * the keys of three daemons: a and b know each other, mallory has a key too.
 */
#include "tests/lib/zmqnet.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "tests/lib/tmp.h"

struct loop *zmqnet_loop;
struct zmqnet_node zmqnet_a, zmqnet_b;
char zmqnet_keys[3][2][41];
static char dir[64];

void zmqnet_turn(uint64_t ns)
{
	uint64_t end_ns = loop_clock_ns(zmqnet_loop) + ns;

	while (loop_clock_ns(zmqnet_loop) < end_ns)
		loop_turn(zmqnet_loop, 5 * LOOP_NS_PER_MS);
}

/* ---- nodes ---- */

static void on_frame(void *owner, const struct link_frame *frame)
{
	struct zmqnet_node *node = owner;
	uint64_t word = 0;

	node->frames++;
	node->last_len = frame->len;
	memcpy(node->last, frame->data, frame->len < 64 ? frame->len : 64);
	memcpy(&word, frame->data, frame->len < 8 ? frame->len : 8);
	node->sum = node->sum * 1000003 + word;
	memcpy(node->user, frame->user, sizeof(node->user));
}

static void on_line(void *owner, void *line_owner, bool connected)
{
	struct zmqnet_node *node = owner;

	(void)line_owner;
	if (connected)
		node->lines_up++;
	else
		node->lines_down++;
}

void zmqnet_defaults(struct zmqnet_node *node)
{
	memset(node, 0, sizeof(*node));
	strcpy(node->config.listen, "tcp://127.0.0.1:0");
	node->config.insecure = true; /* without zmqnet_use_curve() */
	node->config.peers_max = 16;
	node->config.peer_message_bytes = 1 << 20;
	node->config.ping_interval_ns = 50 * LOOP_NS_PER_MS;
	/* nobody here waits for it; its threads may be kept from a core for long */
	node->config.dead_after_ns = 10 * LOOP_NS_PER_S;
}

void zmqnet_listen(struct zmqnet_node *node)
{
	assert_int_equal(link_zmq_new(zmqnet_loop, &node->config, &node->link), 0);
	node->link->owner = node;
	node->link->on_frame = on_frame;
	node->link->on_line = on_line;
}

void zmqnet_stop(struct zmqnet_node *node)
{
	peers_free(node->peers);
	node->peers = NULL;
	if (node->link)
		node->link->ops->free(node->link);
	node->link = NULL;
}

struct link_line *zmqnet_dial(struct zmqnet_node *from, const char *endpoint)
{
	struct link_line *line = NULL;

	assert_int_equal(from->link->ops->dial(from->link, endpoint, from, &line), 0);
	return line;
}

int zmqnet_send(struct zmqnet_node *from, struct link_line *line, const char *text)
{
	return from->link->ops->send(line, text, strlen(text));
}

void zmqnet_plain(const struct zmqnet_node *node, char text[LINK_ENDPOINT_MAX])
{
	snprintf(text, LINK_ENDPOINT_MAX, "%.*s", (int)strcspn(node->link->endpoint, "#"),
		 node->link->endpoint);
}

/* ---- files and keys ---- */

void zmqnet_path(char path[CONFIG_PATH_BYTES], const char *name)
{
	snprintf(path, CONFIG_PATH_BYTES, "%s/%s", dir, name);
}

void zmqnet_write(const char *name, mode_t mode, const char *text)
{
	char path[CONFIG_PATH_BYTES];
	int fd;

	zmqnet_path(path, name);
	unlink(path);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	assert_int_equal(fchmod(fd, mode), 0);
	close(fd);
}

/* Keys of a and b, each other's in the allow file. */
void zmqnet_use_curve(struct zmqnet_node *node, unsigned int key)
{
	static const char *const secrets[] = {"a.secret", "b.secret", "m.secret"};

	zmqnet_write(secrets[key], 0600, zmqnet_keys[key][1]);
	zmqnet_path(node->config.curve_secret_file, secrets[key]);
	zmqnet_path(node->config.curve_allow_file, "allow");
}

void zmqnet_allow(bool with_b)
{
	char text[400];

	snprintf(text, sizeof(text), "# daemons\n\nalice %s\n%s%s%s", zmqnet_keys[0][0],
		 with_b ? "  bob\t" : "", with_b ? zmqnet_keys[1][0] : "",
		 with_b ? "  nodeb 10.9.9.9:7400 \r\n" : "");
	zmqnet_write("allow", 0644, text);
}

int zmqnet_setup(void **state)
{
	(void)state;
	assert_int_equal(loop_new(&zmqnet_loop), 0);
	zmqnet_defaults(&zmqnet_a);
	zmqnet_defaults(&zmqnet_b);
	return 0;
}

int zmqnet_teardown(void **state)
{
	(void)state;
	zmqnet_stop(&zmqnet_a);
	zmqnet_stop(&zmqnet_b);
	loop_free(zmqnet_loop);
	return 0;
}

int zmqnet_group_setup(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(tmp_path(dir, sizeof(dir), "kvd-test-link-XXXXXX")));
	for (unsigned int i = 0; i < 3; i++)
		do /* '#' begins a comment in the files */
			assert_int_equal(
				zmq_curve_keypair(zmqnet_keys[i][0], zmqnet_keys[i][1]),
				0);
		while (*zmqnet_keys[i][0] == '#' || *zmqnet_keys[i][1] == '#');
	return 0;
}

int zmqnet_group_teardown(void **state)
{
	static const char *const names[] = {"a.secret", "b.secret", "m.secret",
					    "allow",	"s",	    "l"};
	char path[CONFIG_PATH_BYTES];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		zmqnet_path(path, names[i]);
		unlink(path);
	}
	return rmdir(dir);
}
