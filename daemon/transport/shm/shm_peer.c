/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the shm backend: one stream socket, on the loop.
 *
 * The side that dials connects to a name of the address, sends HELLO with its token and
 * is ready when WELCOME has the right one; the other waits for a pending connection with
 * its token (shm.c). A daemon's connection to itself has no socket.
 *
 * Loss. There is no BYE, so no FLUSHING: each side knows by itself the effect of a lost
 * connection on its transfers. The socket is closed; every copy is canceled and joined;
 * then each op and inbound has its done, each waiting key its on_key; then on_peer_lost,
 * or on_closed where the user requested the end. So "lost" is reported when no byte
 * moves.
 *
 * shm_peer_step() is where done, key and lost callbacks are called from; requests are
 * handed up as their frames are read.
 */
#include "daemon/transport/shm/shm_private.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "proto/wire.h"

#define DIAL_AGAIN_NS (50 * LOOP_NS_PER_MS) /* the listener's backlog is full */

static bool shm_peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct shm_peer *peer = container_of(sm, const struct shm_peer, net.sm);

	(void)from;
	return sm_state(sm) != NET_PEER_ENDED ||
	       (peer->fd < 0 && list_empty(&peer->net.xfers) && shm_rings_idle(peer));
}

const struct sm_table shm_peer_table = {
	.name = "shm peer",
	.states = net_peer_states,
	.count = NET_PEER_STATES,
	.invariant = shm_peer_invariant,
};

static struct shm_peer *shm_peer_of(struct net_peer *net)
{
	return container_of(net, struct shm_peer, net);
}

/* ---- connecting ---- */

static void shm_peer_on_ready(struct loop_fd *watch, int events)
{
	struct shm_peer *peer = container_of(watch, struct shm_peer, watch);

	if (events & LOOP_READ)
		shm_wire_receive(peer);
	net_peer_flush_soon(&peer->net); /* and watches again */
}

/* Descriptors of all daemons of one user pass through one gate. */
static int peer_hold(struct shm_peer *peer)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);
	int r = gate_prepare(peer->fd);

	if (r == 0 && getsockopt(peer->fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		r = err_raise_errno(errno, "shm: SO_PEERCRED");
	if (r == 0)
		r = gate_hold(peer->shm->net.base.env.gates, &peer->gate, peer->fd,
			      cred.uid);
	return err_pass(r);
}

/* False: there was no memory for it, and the peer is lost. */
static bool peer_attach(struct shm_peer *peer, int fd)
{
	int r;

	peer->fd = fd;
	loop_fd_init(&peer->watch, peer->shm->net.base.env.loop, fd, shm_peer_on_ready);
	peer->gate.on_parcel = shm_wire_on_parcel;
	r = peer_hold(peer);
	if (r == 0)
		r = shm_wire_reserve(peer);
	if (r == 0)
		r = loop_fd_set(&peer->watch, LOOP_READ);
	if (r < 0)
		net_peer_fail_last(&peer->net);
	return r == 0;
}

/* Conditions that may change soon, on this host. */
static int dial_failed(int no)
{
	return err_raise(ERR_TRANSPORT, "shm: connecting: %s", strerror(no));
}

/* No path outside this daemon's run_dir is used: elsewhere, the file system behind a
 * peer's name may block. */
static bool is_in_run_dir(const char *run_dir, const char *path)
{
	size_t len = strlen(run_dir);

	return len && strncmp(path, run_dir, len) == 0 && path[len] == '/' &&
	       !strchr(path + len + 1, '/');
}

/* Is the peer's path its socket here, too? Daemons of two containers may have the same
 * name and run_dir, and neither sees the other's. */
static const char *path_not_theirs(const struct shm_peer *peer, const char *path)
{
	const struct shm_address *address = &peer->address;
	struct stat st;

	if (!is_in_run_dir(peer->shm->net.base.env.config->run_dir, path))
		return "not in this daemon's run_dir";
	if (lstat(path, &st) < 0)
		return strerror(errno);
	return st.st_dev == address->device && st.st_ino == address->inode
		       ? NULL
		       : "another daemon's";
}

/* 0 connected, 1 try again later, 2 it does not lead to the peer: *no_p. */
static int dial_name(const struct shm_peer *peer, const char *name, int *fd_p,
		     const char **no_p)
{
	cleanup_close int fd = -1;
	struct sockaddr_un sa;
	socklen_t len;

	*no_p = name[0] != '@'			 ? path_not_theirs(peer, name)
		: strncmp(name, "@kvd-", 5) == 0 ? NULL
						 : "not a kvd socket name";
	if (*no_p)
		return 2;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return dial_failed(errno);
	if (shm_sockaddr(name, &sa, &len) == 0 &&
	    connect(fd, (struct sockaddr *)&sa, len) == 0) {
		*fd_p = mem_steal_fd(&fd);
		return 0;
	}
	if (errno == EAGAIN || errno == EINTR)
		return 1; /* the backlog is full */
	if (errno == ENOMEM || errno == ENOBUFS)
		return dial_failed(errno);
	*no_p = strerror(errno);
	return 2;
}

/* The same, or ERR_REQUIRE: no name reaches the peer from here. That is final, since it
 * listened before it sent them. */
static int dial_names(const struct shm_peer *peer, int *fd_p)
{
	const char *no = "";
	char text[200] = "";
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_LEN(peer->address.names); i++) {
		const char *name = peer->address.names[i];
		int r = name[0] ? dial_name(peer, name, fd_p, &no) : 2;

		if (r < 2)
			return err_pass(r);
		if (name[0] && n < sizeof(text))
			n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%.80s: %s",
					      n ? ", " : "", name, no);
	}
	wire_text_clean(text); /* it contains the peer's text */
	return err_raise(
		ERR_REQUIRE,
		"%s needs a network namespace or run_dir shared by both daemons (%s)",
		net_name(&peer->net), text);
}

/* ERR_REQUIRE as above; every other fault fails the peer. */
static int peer_dial(struct shm_peer *peer)
{
	int fd = -1, r = dial_names(peer, &fd);

	if (r == -err_errno(ERR_REQUIRE))
		return err_pass(r);
	if (r > 0) {
		net_peer_watch(&peer->net,
			       loop_now_ns(peer->net.timer.loop) + DIAL_AGAIN_NS);
	} else if (r < 0) {
		net_peer_fail_last(&peer->net);
	} else if (peer_attach(peer, fd)) {
		sm_move(&peer->net.sm, NET_PEER_JOINING);
		shm_send_hello(peer, SHM_HELLO);
	}
	return 0;
}

static void peer_joined(struct shm_peer *peer)
{
	snprintf(peer->net.base.path, sizeof(peer->net.base.path), "%s",
		 peer->self	  ? "self"
		 : peer->shm->gpu ? "memfd, CUDA"
				  : "memfd");
	sm_move(&peer->net.sm, NET_PEER_READY);
	net_peer_kick(&peer->net);
}

void shm_peer_welcome(struct shm_peer *peer, int fd)
{
	if (!peer_attach(peer, fd))
		return;
	peer_joined(peer);
	shm_send_hello(peer, SHM_WELCOME);
}

int shm_on_welcome(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	const void *token;
	int r = shm_hello_body(c, &token);

	(void)f;
	if (r < 0)
		return err_pass(r);
	if (!mem_equal(token, peer->net.token_in, XP_TOKEN_BYTES))
		return err_raise(ERR_AUTH, "the token does not match the handshake's");
	peer_joined(peer);
	return 0;
}

/* ---- deadlines ---- */

static void watch_connect(struct shm_peer *peer, uint64_t now)
{
	struct err err;

	if (now >= peer->deadline_ns) {
		err_set(&err, ERR_TIMEOUT,
			"no data connection by shm: the peer %s within %ju ms",
			peer->net.dial ? "did not accept the connection"
				       : "did not connect",
			(uintmax_t)(peer->shm->acceptor.wait_ns / LOOP_NS_PER_MS));
		net_peer_fail(&peer->net, &err);
		return;
	}
	net_peer_watch(&peer->net, peer->deadline_ns);
	if (peer->net.dial && sm_state(&peer->net.sm) == NET_PEER_OPENING &&
	    peer_dial(peer) < 0) { /* it was there before */
		err_raise(ERR_TRANSPORT, "shm: connection to the peer lost: %s",
			  err_last()->text);
		net_peer_fail_last(&peer->net);
	}
}

static void shm_peer_on_timer(struct loop_timer *timer)
{
	struct shm_peer *peer = container_of(timer, struct shm_peer, net.timer);
	uint64_t now = loop_now_ns(timer->loop);

	if (shm_peer_ready(peer))
		(void)net_peer_watch_fences(&peer->net, now);
	else if (net_peer_live(&peer->net))
		watch_connect(peer, now);
}

/* ---- the step ---- */

void shm_peer_flush(struct net_peer *net)
{
	struct shm_peer *peer = shm_peer_of(net);
	bool blocked;

	if (!net_peer_live(net))
		return;
	if (peer->self) {
		shm_wire_loop_back(peer);
	} else if (shm_peer_speaks(peer)) {
		blocked = shm_wire_flush(peer);
		if (net_peer_live(&peer->net) &&
		    loop_fd_set(&peer->watch,
				(gate_receiving(&peer->gate) ? 0 : LOOP_READ) |
					(blocked ? LOOP_WRITE : 0)) < 0)
			net_peer_fail_last(&peer->net);
	}
}

static void shm_peer_begin_end(struct shm_peer *peer)
{
	net_peer_end(&peer->net);
	loop_work_stop(&peer->frames);
	if (peer->fd < 0)
		return;
	loop_fd_stop(&peer->watch);
	if (peer->gate.gates)
		gate_close(&peer->gate, &peer->fd);
	else
		gate_turn_away(peer->shm->net.base.env.gates, mem_steal_fd(&peer->fd));
}

static void end_step(struct shm_peer *peer)
{
	net_xfers_drop(&peer->net);
	if (!list_empty(&peer->net.xfers) || !shm_rings_idle(peer))
		return; /* each of them kicks when it is */
	shm_wire_fini(&peer->wire);
	shm_keys_end(peer);
	shm_rings_fini(peer);
	sm_move(&peer->net.sm, NET_PEER_ENDED);
}

void shm_peer_step(struct net_peer *net)
{
	struct shm_peer *peer = shm_peer_of(net);

	if (shm_peer_ready(peer) && !net->base.ready)
		net_peer_ready(net);
	if (net->failed && sm_state(&net->sm) < NET_PEER_ENDING)
		shm_peer_begin_end(peer);
	if (peer->wire.urgent)
		shm_peer_flush(net); /* bytes stop before the callbacks take their time */
	peer->wire.urgent = false;
	net_peer_tell(net);
	if (shm_peer_ready(peer)) {
		net_xfer_pump(net);
		shm_keys_pump(peer);
	}
	net_peer_stepped(net);
	if (sm_state(&net->sm) == NET_PEER_ENDING)
		end_step(peer);
	net_peer_settle(net);
}

/* ---- opening and closing ---- */

void shm_peer_free(struct net_peer *net)
{
	struct shm_peer *peer = shm_peer_of(net);

	shm_keys_detach(peer);
	shm_wire_fini(&peer->wire);
	net_peer_fini(net);
	assert(!loop_work_running(&peer->frames));
	mem_free(peer);
}

static void shm_peer_init(struct shm_peer *peer, struct shm *shm,
			  const struct xp_peer_args *args)
{
	net_peer_init(&peer->net, &shm->net, args, shm_peer_on_timer);
	peer->shm = shm;
	peer->self = args->self;
	peer->fd = -1;
	peer->gpu_owner = UINT64_MAX - ++shm->next_owner;
	list_init(&peer->keys);
	list_init(&peer->asked);
	list_init(&peer->held);
	list_init(&peer->orphans);
	shm_ring_init(peer);
	shm_wire_init(&peer->wire);
	shm_wire_frames_init(peer);
}

static int peer_begin(struct shm_peer *peer)
{
	int fd;

	if (peer->self) {
		peer_joined(peer);
		return 0;
	}
	peer->deadline_ns =
		loop_now_ns(peer->net.timer.loop) + peer->shm->acceptor.wait_ns;
	net_peer_watch(&peer->net, peer->deadline_ns);
	if (peer->net.dial)
		return err_pass(peer_dial(peer));
	fd = shm_pending_claim(peer->shm, peer);
	if (fd >= 0)
		shm_peer_welcome(peer, fd);
	return 0;
}

int shm_peer_open(struct transport *transport, const struct xp_peer_args *args,
		  struct xp_peer **peer_p)
{
	struct shm *shm = container_of(transport, struct shm, net.base);
	struct shm_address address = {0};
	struct shm_peer *peer;
	int r = 0;

	if (!args->self)
		r = shm_address_parse(args->address, args->address_len, &address);
	if (r < 0)
		return err_pass(r);
	if (!args->self && memcmp(address.boot_id, shm->net.base.env.boot_id,
				  sizeof(address.boot_id)) != 0)
		return err_raise(ERR_REQUIRE, "shm: the peer runs on another machine");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	shm_peer_init(peer, shm, args);
	peer->address = address;
	r = args->self ? shm_wire_prepare(&peer->wire) : 0;
	list_push_back(&shm->net.peers, &peer->net.link);
	if (r == 0)
		r = peer_begin(peer);
	if (r < 0) {
		shm_peer_free(&peer->net);
		return err_pass(r);
	}
	*peer_p = (struct xp_peer *)peer;
	return 0;
}

void shm_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct shm_peer *peer = (struct shm_peer *)base;

	net_peer_close_ask(&peer->net, on_closed, arg);
	if (shm_peer_ready(peer) && !peer->self)
		(void)shm_wire_flush(peer); /* up to the space in the socket */
	if (sm_state(&peer->net.sm) < NET_PEER_ENDING)
		shm_peer_begin_end(peer);
}
