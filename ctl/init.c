/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command init: writes the files that an instance on one of several hosts needs, all
 * or none. It never overwrites an existing file, and removes its own files if it fails.
 * The daemon generates its key pair at its first start. A peer's key is known only after
 * that peer has started; until then its line is a comment, unless the key is given.
 */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "ctl/ctl.h"

#define NAME_CHARS                                                       \
	"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" \
	"._-"
/* limits of the allow-list (daemon/link) */
#define KEY_CHARS 40
#define NAME_MAX_BYTES 63
#define HOST_MAX_BYTES 127

#define PEERS_HEAD "# NAME KEY HOST:PORT of each daemon that may connect"
#define PEERS_FIRST 2u /* line of the file */

struct init {
	struct ctl *ctl;
	const char *dir;
	char host[64];
	unsigned long port;
	char conf[512], peers[512];
	char *conf_text, *peers_text; /* owned */
};

static bool init_name_ok(const char *name, size_t len)
{
	return len > 0 && len <= NAME_MAX_BYTES && *name != '.' &&
	       strspn(name, NAME_CHARS) >= len;
}

static bool init_key_ok(const char *key)
{
	uint8_t bytes[KEY_CHARS];

	return strlen(key) == KEY_CHARS && zmq_z85_decode(bytes, key);
}

/* ADDRESS:PORT, IPv6 in brackets. */
static int take_listen(struct init *init)
{
	const char *listen = init->ctl->listen, *colon;
	struct in6_addr six;
	struct in_addr four;
	char *end = NULL;
	size_t len;

	if (listen && strncmp(listen, "tcp://", 6) == 0)
		listen += 6;
	colon = listen ? strrchr(listen, ':') : NULL;
	len = colon ? (size_t)(colon - listen) : 0;
	if (colon)
		init->port = strtoul(colon + 1, &end, 10);
	if (!len || len >= sizeof(init->host) || *end || !init->port ||
	    init->port > 65534)
		return ctl_usage(
			"init: --listen: ADDRESS:PORT with a port of 1 to 65534");
	memcpy(init->host, listen, len);
	if (inet_pton(AF_INET, init->host, &four) == 1)
		return CTL_OK;
	if (len > 2 && init->host[0] == '[' && init->host[len - 1] == ']') {
		init->host[len - 1] = '\0';
		if (inet_pton(AF_INET6, init->host + 1, &six) == 1) {
			init->host[len - 1] = ']';
			return CTL_OK;
		}
	}
	return ctl_usage("init: --listen %s: the address must be numeric",
			 init->ctl->listen);
}

/* Writes NAME=HOST:PORT[#KEY] as a line of the allow-list. */
static int put_peer(const char *peer, FILE *out)
{
	const char *host = strchr(peer, '='), *key = host ? strchr(host, '#') : NULL;
	size_t name_len = host ? (size_t)(host - peer) : 0;
	int host_len = !host ? 0 : key ? (int)(key - host) - 1 : (int)strlen(host + 1);

	if (!init_name_ok(peer, name_len) || host_len < 1 || host_len > HOST_MAX_BYTES ||
	    strpbrk(host, " \t\n") || (key && !init_key_ok(key + 1)))
		return ctl_usage("init: --peer %s: NAME=HOST:PORT, or NAME=HOST:PORT#KEY",
				 peer);
	fprintf(out, "%s%.*s %s %.*s\n", key ? "" : "# ", (int)name_len, peer,
		key ? key + 1 : "KEY", host_len, host + 1);
	return CTL_OK;
}

static bool named_before(const struct init *init, unsigned int i)
{
	const char *const *words = init->ctl->peers.word;
	size_t len = strcspn(words[i], "=") + 1;

	for (unsigned int k = 0; k < i; k++) {
		if (strncmp(words[k], words[i], len) == 0)
			return true;
	}
	return false;
}

static int make_peers(struct init *init)
{
	size_t len;
	FILE *out = open_memstream(&init->peers_text, &len);
	int r = CTL_OK;

	if (!out)
		return ctl_failed("out of memory");
	fputs(PEERS_HEAD "\n", out);
	for (unsigned int i = 0; !r && i < init->ctl->peers.count; i++) {
		r = put_peer(init->ctl->peers.word[i], out);
		if (!r && named_before(init, i))
			r = ctl_usage("init: --peer %s: duplicate name; a name is one "
				      "user, so each daemon needs its own",
				      init->ctl->peers.word[i]);
	}
	fclose(out);
	return r;
}

static int make_conf(struct init *init)
{
	if (asprintf(&init->conf_text,
		     "# kvd --print-config lists all options.\n"
		     "[daemon]\nname = %s\n\n"
		     "[peer]\nlisten = tcp://%s:%lu\ncurve_allow_file = %s\n\n"
		     "[transport]\ntcp_listen = tcp://%s:%lu\n",
		     init->ctl->name, init->host, init->port, init->peers, init->host,
		     init->port + 1) < 0) {
		init->conf_text = NULL;
		return ctl_failed("out of memory");
	}
	return CTL_OK;
}

static int write_all(const struct init *init)
{
	int r = ctl_write_new(init->peers, 0644, NULL, init->peers_text);

	if (r)
		return r;
	r = ctl_write_new(init->conf, 0644, NULL, init->conf_text);
	if (r)
		unlink(init->peers);
	return r;
}

/* Lines without a key. */
static void init_print_waiting(const struct init *init)
{
	for (unsigned int i = 0; i < init->ctl->peers.count; i++) {
		const char *peer = init->ctl->peers.word[i];

		if (strchr(peer, '#'))
			continue;
		fprintf(stderr,
			"kvd-ctl: %s:%u: replace this line with the one that kvd-ctl "
			"keys prints for %.*s on its host\n",
			init->peers, PEERS_FIRST + i, (int)strcspn(peer, "="), peer);
	}
}

static void init_print(const struct init *init)
{
	if (init->ctl->json) {
		printf("{\"conf\":\"%s\",\"peers\":\"%s\"}\n", init->conf, init->peers);
		return;
	}
	fprintf(stderr,
		"kvd-ctl: written: %s, %s\nkvd-ctl: the daemon generates its key at its "
		"first start; then `kvd-ctl --name %s keys` prints the line for the "
		"allow-lists of its peers\n",
		init->conf, init->peers, init->ctl->name);
}

static int init_files(struct init *init)
{
	int r = take_listen(init);

	snprintf(init->conf, sizeof(init->conf), "%.250s/%.63s.conf", init->dir,
		 init->ctl->name);
	snprintf(init->peers, sizeof(init->peers), "%.250s/%.63s.peers", init->dir,
		 init->ctl->name);
	if (!r)
		r = make_peers(init);
	if (!r)
		r = make_conf(init);
	if (!r)
		r = write_all(init);
	return r;
}

int ctl_run_init(struct ctl *ctl)
{
	struct init init = {.ctl = ctl, .dir = ctl->dir ? ctl->dir : "/etc/kvd"};
	int r;

	if (!ctl->name || !init_name_ok(ctl->name, strlen(ctl->name)))
		return ctl_usage("init: --name NAME: letters, digits, '.', '_' and '-'");
	if (*init.dir != '/' || strlen(init.dir) > 180 || strpbrk(init.dir, "\"\\\n;#"))
		return ctl_usage("init: --dir: an absolute path of up to 180 bytes");
	r = init_files(&init);
	if (!r) {
		init_print(&init);
		init_print_waiting(&init);
	}
	free(init.conf_text);
	free(init.peers_text);
	return r;
}
