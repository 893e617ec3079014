/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm: transfers between two daemons of one host.
 *
 * The daemon of the destination engine does every copy into it. It maps the
 * source engine's memory, whose file the other daemon passes read-only, and its
 * own copy threads do the rest: one copy, and no byte through a socket. So
 * stopping a transfer into an engine is a local matter (join the threads), and
 * a peer can hurt no engine's memory but its own.
 *
 * A shared mapping cannot show whether the source was valid while it was read; this is
 * checked after the copy. A WRITE counts when the initiator answers COPIED with CONFIRM;
 * a READ when the source answers CHECK. Both fail by default: silence, a cancel or a lost
 * peer counts nothing. The rest of a transfer's and a connection's life is net.h's.
 *
 *   WRITE   A: REQUEST -> B: land, copy -> COPIED -> A: CONFIRM -> B: inbound
 *           done, DONE -> A: done
 *   READ    A: copy; REQUEST(check) -> B: land -> DONE -> A: done
 *
 * Memory that has no file to pass is read in its process, where that may be (shm_vm.c).
 * All other memory, and memory without a ready mapping, is copied through a bounce
 * ring (shm_ring.c): after REQUEST, B sends STAGE and A fills slots; of a READ, A sends
 * REQUEST(read) and B fills slots.
 *
 * Requests, answers and fds travel on a Unix stream socket that the daemon with the lower
 * instance id dials. It is found by the address in HELLO, an abstract name and, where the
 * run directory is shared, a path: containers share the one or the other. The same path
 * may be another daemon's in the dialler's files, so the address identifies the file. The
 * connecting daemon is known by the token that the handshake gave it; a connection
 * without an expected token stays pending for some seconds, and the oldest is closed when
 * there are too many. (Rejected: a socketpair passed over the handshake's connection,
 * which may be TCP; SOCK_SEQPACKET, whose packets hold no 2 MiB header.)
 *
 * A passed fd is read-only, but an engine that leaves its memfd's mode at 0777 lets any
 * process that holds an fd of it reopen it for writing. Daemons trust each other to that
 * extent by the handshake; F_SEAL_FUTURE_WRITE would help and would keep a restarted
 * daemon from mapping the memory.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"

#define ADDRESS_VERSION 3u
#define LISTEN_BACKLOG 64

/* ---- small help ---- */

void shm_random(void *buf, size_t len)
{
	uint8_t *p = buf;

	while (len > 0) {
		ssize_t n = getrandom(p, len, 0);

		if (n > 0) {
			p += n;
			len -= (size_t)n;
		}
	}
}

/* ---- addresses ---- */

int shm_sockaddr(const char *name, struct sockaddr_un *sa_p, socklen_t *len_p)
{
	size_t len = strlen(name);

	*sa_p = (struct sockaddr_un){.sun_family = AF_UNIX};
	if (len >= sizeof(sa_p->sun_path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	memcpy(sa_p->sun_path, name, len);
	if (name[0] == '@') {
		sa_p->sun_path[0] = '\0';
		*len_p = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
	} else {
		*len_p = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + 1);
	}
	return 0;
}

static int shm_address_make(struct shm *shm)
{
	struct cursor c;
	int r;

	cursor_write(&c, shm->net.base.address, sizeof(shm->net.base.address));
	cursor_put_u8(&c, ADDRESS_VERSION);
	cursor_put_bytes(&c, shm->net.base.env.boot_id,
			 sizeof(shm->net.base.env.boot_id));
	for (size_t i = 0; i < ARRAY_LEN(shm->names); i++)
		cursor_put_str(&c, shm->names[i]);
	cursor_put_u64(&c, shm->device);
	cursor_put_u64(&c, shm->inode);
	cursor_put_u32(&c, geteuid());
	r = cursor_check(&c, "shm address");
	shm->net.base.address_len = c.pos;
	return err_pass(r);
}

int shm_address_parse(const void *buf, size_t len, struct shm_address *address_p)
{
	struct cursor c;
	const void *boot_id;
	uint8_t version;
	int r;

	*address_p = (struct shm_address){0};
	cursor_read(&c, buf, len);
	version = cursor_get_u8(&c);
	boot_id = cursor_get_bytes(&c, sizeof(address_p->boot_id));
	for (size_t i = 0; i < ARRAY_LEN(address_p->names); i++)
		cursor_get_str(&c, address_p->names[i], sizeof(address_p->names[i]));
	address_p->device = cursor_get_u64(&c);
	address_p->inode = cursor_get_u64(&c);
	address_p->uid = cursor_get_u32(&c);
	r = cursor_check(&c, "shm address");
	if (r < 0)
		return err_pass(r);
	if (version != ADDRESS_VERSION)
		return err_raise(ERR_VERSION, "shm: address version %u", version);
	memcpy(address_p->boot_id, boot_id, sizeof(address_p->boot_id));
	return 0;
}

/* ---- pending connections ---- */

int shm_pending_claim(struct shm *shm, struct shm_peer *peer)
{
	uint8_t token[XP_TOKEN_BYTES];
	struct net_pending *pending;

	net_acceptor_look(&shm->acceptor);
	list_foreach(pending, &shm->acceptor.pendings, link)
		if (pending->complete && shm_hello_parse(pending->hello, token) == 0 &&
		    mem_equal(token, peer->net.token_in, XP_TOKEN_BYTES))
			return net_pending_take(pending);
	return -1;
}

static int shm_door_meet(struct net_pending *pending)
{
	uint8_t token[XP_TOKEN_BYTES];
	struct shm_peer *peer;
	int r = shm_hello_parse(pending->hello, token);

	if (r < 0)
		return err_pass(r);
	list_foreach(peer, &pending->acceptor->net->peers, net.link) {
		if (peer->self || peer->net.dial || !net_peer_live(&peer->net) ||
		    sm_state(&peer->net.sm) != NET_PEER_OPENING ||
		    !mem_equal(token, peer->net.token_in, XP_TOKEN_BYTES))
			continue;
		shm_peer_welcome(peer, net_pending_take(pending));
		return 0;
	}
	return NET_PENDING_WAITS;
}

static void shm_door_want_tick(struct net_acceptor *acceptor)
{
	shm_tick_want(container_of(acceptor, struct shm, acceptor));
}

/* Daemons of this daemon's user, of root, and of users whose daemons are its peers. */
static bool shm_door_admits(struct net_acceptor *acceptor, int fd)
{
	const struct shm_peer *peer;
	struct ucred cred;
	socklen_t len = sizeof(cred);

	if (gate_prepare(fd) < 0 ||
	    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0) {
		err_clear();
		return false;
	}
	if (cred.uid == geteuid() || cred.uid == 0)
		return true;
	list_foreach(peer, &acceptor->net->peers, net.link)
		if (!peer->self && peer->address.uid == cred.uid)
			return true;
	return false;
}

/* ---- the tick ---- */

/* Of as many transfers as there is time for; the next tick starts with the others. */
static bool peer_progress(struct shm_peer *peer, struct loop *loop)
{
	const struct shm_xfer *begin = NULL;
	struct shm_xfer *xfer;
	bool wanted = false;

	while ((xfer = list_first(&peer->net.xfers, struct shm_xfer, net.link)) &&
	       xfer != begin) {
		begin = begin ? begin : xfer;
		list_remove(&xfer->net.link);
		list_push_back(&peer->net.xfers, &xfer->net.link);
		wanted |= shm_xfer_progress(xfer);
		if (loop_enough(loop))
			return true;
	}
	return wanted;
}

static void shm_on_tick(struct loop_timer *timer)
{
	struct shm *shm = container_of(timer, struct shm, tick);
	struct shm_peer *peer;
	bool wanted = false;

	list_foreach(peer, &shm->net.peers, net.link)
		wanted |= peer_progress(peer, timer->loop);
	net_acceptor_tick(&shm->acceptor, &wanted);
	if (wanted)
		shm_tick_want(shm);
}

void shm_tick_want(struct shm *shm)
{
	if (!loop_timer_running(&shm->tick))
		loop_timer_start(&shm->tick, SHM_TICK_NS);
}

/* ---- opening ---- */

static int listener_open(struct shm *shm, unsigned int at, const char *name)
{
	cleanup_close int fd = -1;
	struct sockaddr_un sa;
	struct stat st = {0};
	socklen_t len = 0;
	int r;

	if (shm_sockaddr(name, &sa, &len) < 0)
		return err_raise_errno(errno, "shm: socket name %s", name);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return err_raise_errno(errno, "shm: socket");
	if (name[0] != '@')
		(void)unlink(name); /* left by a dead daemon; owned by this one through
				     * the name's lock */
	if (bind(fd, (struct sockaddr *)&sa, len) < 0)
		return err_raise_errno(errno, "shm: bind to %s", name);
	if (name[0] != '@') {
		(void)chmod(name, 0660);
		if (stat(name, &st) < 0)
			return err_raise_errno(errno, "shm: %s", name);
		shm->device = st.st_dev;
		shm->inode = st.st_ino;
	}
	if (listen(fd, LISTEN_BACKLOG) < 0)
		return err_raise_errno(errno, "shm: listen on %s", name);
	r = net_acceptor_listen(&shm->acceptor, at, mem_steal_fd(&fd));
	if (r == 0)
		snprintf(shm->names[at], sizeof(shm->names[at]), "%s", name);
	return err_pass(r);
}

/* The path is an entrance for containers that share the run directory but no network
 * namespace; it may be missing, the abstract name may not. */
static int listeners_open(struct shm *shm)
{
	const struct config *config = shm->net.base.env.config;
	char name[sizeof(shm->names[0])];
	char digits[HEX_CHARS(8) + 1];
	uint8_t random[8];
	int n, r;

	shm_random(random, sizeof(random));
	hex_write(random, sizeof(random), digits);
	snprintf(name, sizeof(name), "@kvd-%s-%s", shm->net.base.ops->name, digits);
	r = listener_open(shm, 0, name);
	if (r < 0 || !config->run_dir[0])
		return err_pass(r);
	n = snprintf(name, sizeof(name), "%s/%s.%s", config->run_dir, config->name,
		     shm->net.base.ops->name);
	if (n >= (int)sizeof(name))
		err_raise(ERR_TOOBIG, "shm: %s is too long for a socket",
			  config->run_dir);
	else if (listener_open(shm, 1, name) == 0)
		return 0;
	log_info("shm", NULL, "no socket in the run directory", "reason=\"%s\"",
		 err_last()->text);
	err_clear();
	return 0;
}

int shm_probe(const struct config *config, uint32_t *caps_p)
{
	cleanup_close int fd = memfd_create("kvd-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	(void)config;
	if (fd < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
		return err_raise(ERR_REQUIRE, "shm: this kernel has no sealed memfd (%s)",
				 strerror(errno));
	*caps_p = XP_CAP_SAME_HOST | XP_CAP_SELF | XP_CAP_ALONE;
	return 0;
}

void shm_close(struct transport *transport)
{
	struct shm *shm = container_of(transport, struct shm, net.base);
	struct stat st;

	net_fini(&shm->net);
	net_acceptor_close(&shm->acceptor);
	if (shm->names[1][0] && stat(shm->names[1], &st) == 0 &&
	    st.st_ino == shm->inode && st.st_dev == shm->device)
		(void)unlink(shm->names[1]); /* not a successor's */
	loop_timer_stop(&shm->tick);
	pthread_mutex_destroy(&shm->regs_lock);
	mem_free(shm);
}

int shm_open_as(const struct transport_ops *ops, const struct xp_env *env,
		const struct xp_callbacks *callbacks, struct transport **transport_p)
{
	struct shm *shm = mem_zalloc(sizeof(*shm));
	int r;

	if (!shm)
		return err_pass(-ENOMEM);
	net_init(&shm->net, &shm_net_ops, ops, env, callbacks);
	net_acceptor_init(&shm->acceptor, &shm->net);
	shm->acceptor.meet = shm_door_meet;
	shm->acceptor.want_tick = shm_door_want_tick;
	shm->acceptor.admits = shm_door_admits;
	shm->acceptor.max = SHM_PENDING_MAX;
	shm->acceptor.hello_bytes = SHM_HELLO_BYTES;
	shm->acceptor.wait_ns = net_connect_ns(env->config, SHM_CONNECT_NS);
	shm->vm_direct = env->config->vm_direct;
	for (size_t i = 0; i < SHM_REG_BUCKETS; i++)
		list_init(&shm->regs[i]);
	loop_timer_init(&shm->tick, env->loop, shm_on_tick);
	pthread_mutex_init(&shm->regs_lock, NULL);
	r = shm_probe(env->config, &shm->net.base.caps);
	if (r == 0)
		r = listeners_open(shm);
	if (r == 0)
		r = shm_address_make(shm);
	if (r < 0) {
		shm_close(&shm->net.base);
		return err_pass(r);
	}
	*transport_p = &shm->net.base;
	return 0;
}

static int shm_open_transport(const struct xp_env *env,
			      const struct xp_callbacks *callbacks,
			      struct transport **transport_p)
{
	return err_pass(shm_open_as(&shm_transport, env, callbacks, transport_p));
}

const struct transport_ops shm_transport = {
	.name = "shm",
	.probe = shm_probe,
	.open = shm_open_transport,
	SHM_SLOTS,
};
