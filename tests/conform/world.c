/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Worlds: ends, the control sockets to those in other processes, and time.
 *
 * The fake's ends live in this process on one virtual loop. Of a real backend's
 * ends, A lives here and the others in processes of their own, which run this
 * binary with --puppet: two daemons share no state but what the backend passes.
 * A control message is a struct cmd, its blob, and at most one fd; the driver
 * sends one and turns its own loop until the reply is there, so that its end
 * lives on meanwhile. An end on another machine is behind a keeper (keeper.h).
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake.h"
#include "daemon/memory/memory.h"
#include "tests/conform/conform.h"
#include "tests/conform/keeper.h"
#include "tests/conform/message.h"

#define CALL_NS (60 * LOOP_NS_PER_S)
#define OWED_MAX 64u /* their replies fit into the socket's buffers */

static const void *reply_blob; /* of the last remote call */

/* ---- the puppet's process ---- */

struct served {
	struct loop_fd watch;
	struct puppet *puppet;
	struct loop *loop;
	bool gone; /* the driver */
};

static void on_command(struct loop_fd *watch, int events)
{
	struct served *served = container_of(watch, struct served, watch);
	struct cmd cmd;
	struct reply reply;
	const void *out;
	void *blob;
	int fd = -1, out_fd;

	(void)events;
	if (!recv_all(watch->fd, &cmd, sizeof(cmd), &fd) ||
	    !recv_blob(watch->fd, cmd.blob_len, &blob)) {
		served->gone = true;
		return;
	}
	puppet_do(served->puppet, &cmd, blob, fd, &reply, &out, &out_fd);
	free(blob);
	if (fd >= 0)
		close(fd);
	if (!send_all(watch->fd, &reply, sizeof(reply), out_fd) ||
	    !send_all(watch->fd, out, reply.blob_len, -1))
		served->gone = true;
}

int puppet_main(const char *backend, int control_fd)
{
	const struct transport_ops *ops = transport_find(backend);
	struct xp_env env;
	struct served served = {0};

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!ops || memory_guard_install() < 0 ||
	    backend_env_new(backend, false, &env) < 0 ||
	    puppet_new(ops, &env, &served.puppet) < 0) {
		fprintf(stderr, "puppet: %s\n", err_last()->text);
		return 3;
	}
	loop_fd_init(&served.watch, env.loop, control_fd, on_command);
	if (loop_fd_set(&served.watch, LOOP_READ) < 0)
		return 3;
	while (!served.gone && !puppet_ended(served.puppet))
		loop_turn(env.loop, 5 * MS); /* what ends in it is seen then */
	loop_fd_stop(&served.watch);
	if (served.gone)
		return 4;
	puppet_free(served.puppet);
	backend_env_free(&env);
	return 0;
}

/* ---- calls ---- */

static bool reply_waits(const struct end *end)
{
	struct pollfd poll_fd = {.fd = end->sock, .events = POLLIN};

	return poll(&poll_fd, 1, 0) > 0;
}

static void died(struct end *end)
{
	end->alive = false;
	end->world->spent = true;
	FAIL("end %c died", 'A' + (char)end->index);
}

static void remote_send(struct end *end, const struct cmd *cmd, const void *blob, int fd)
{
	CHECK(send_all(end->sock, cmd, sizeof(*cmd), fd) &&
		      send_all(end->sock, blob, cmd->blob_len, -1),
	      "end %c is dead", 'A' + (char)end->index);
}

/* The next one; our own end lives on until it is there. *blob_p is to be freed. */
static struct reply remote_reply(struct end *end, void **blob_p, int *fd_p)
{
	uint64_t until_ns = world_now_ns(end->world) + CALL_NS;
	struct reply reply;

	while (!reply_waits(end)) {
		CHECK(world_now_ns(end->world) < until_ns, "end %c does not answer",
		      'A' + (char)end->index);
		loop_turn(end->world->env.loop, MS / 10);
	}
	if (!recv_all(end->sock, &reply, sizeof(reply), fd_p) ||
	    !recv_blob(end->sock, reply.blob_len, blob_p))
		died(end);
	return reply;
}

/* Replies that nobody waited for. */
static void remote_settle(struct end *end)
{
	void *blob;
	int fd;

	for (; end->owed; end->owed--) {
		remote_reply(end, &blob, &fd);
		free(blob);
	}
}

static struct reply call_remote(struct end *end, const struct cmd *cmd, const void *blob,
				int fd, int *reply_fd_p)
{
	static void *kept;
	struct reply reply;

	free(kept);
	kept = NULL;
	*reply_fd_p = -1;
	remote_send(end, cmd, blob, fd);
	remote_settle(end);
	reply = remote_reply(end, &kept, reply_fd_p);
	reply_blob = kept;
	return reply;
}

void end_post(struct end *end, const struct cmd *cmd, const void *blob)
{
	const void *out;
	int fd;

	if (end->far && end->owed < OWED_MAX) {
		remote_send(end, cmd, blob, -1);
		end->owed++;
	} else {
		end_call_full(end, cmd, blob, -1, &out, &fd);
	}
}

struct reply end_call_full(struct end *end, const struct cmd *cmd, const void *blob,
			   int fd, const void **reply_blob_p, int *reply_fd_p)
{
	struct reply reply;

	CHECK(end->alive, "end %c is not alive", 'A' + (char)end->index);
	if (!end->puppet) {
		reply = call_remote(end, cmd, blob, fd, reply_fd_p);
		*reply_blob_p = reply_blob;
		return reply;
	}
	puppet_do(end->puppet, cmd, blob, fd, &reply, reply_blob_p, reply_fd_p);
	return reply;
}

struct reply end_keep(struct end *end, const struct cmd *cmd, const void *blob,
		      const void **reply_blob_p)
{
	struct reply reply;
	int fd;

	CHECK(end->far, "end %c has no keeper", 'A' + (char)end->index);
	reply = call_remote(end, cmd, blob, -1, &fd);
	*reply_blob_p = reply_blob;
	return reply;
}

void end_signal(struct end *end, int number)
{
	const struct cmd cmd = {.type = KEEP_SIGNAL, .a = {(uint64_t)number}};
	const void *out;

	if (end->far)
		end_keep(end, &cmd, NULL, &out);
	else
		kill(end->pid, number);
}

struct reply end_call(struct end *end, enum cmd_type type, uint64_t a0, uint64_t a1,
		      uint64_t a2, uint64_t a3)
{
	struct cmd cmd = {.type = type, .a = {a0, a1, a2, a3}};
	const void *blob;
	int fd;

	return end_call_full(end, &cmd, NULL, -1, &blob, &fd);
}

uint32_t slot_take(struct slots *slots, uint32_t max)
{
	for (uint32_t i = 0; i < max; i++) {
		uint32_t slot = (slots->hint + i) % max;

		if (!slots->used[slot]) {
			slots->used[slot] = true;
			slots->hint = slot + 1;
			return slot;
		}
	}
	FAIL("no slot is left");
}

/* ---- time ---- */

uint64_t world_now_ns(const struct world *world)
{
	return loop_clock_ns(world->env.loop);
}

void world_step(struct world *world, uint64_t max_ns)
{
	loop_turn(world->env.loop, max_ns);
}

void world_run_ns(struct world *world, uint64_t ns)
{
	uint64_t until_ns = world_now_ns(world) + ns;

	while (world_now_ns(world) < until_ns)
		world_step(world, until_ns - world_now_ns(world));
}

uint64_t world_random(struct world *world, uint64_t below)
{
	uint64_t z = world->seed += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return (z ^ (z >> 31)) % below;
}

/* ---- peers ---- */

struct peer_state end_peer(struct end *end, const struct end *other)
{
	struct cmd cmd = {.type = CMD_PEER_STATE, .a = {other->index}};
	struct peer_state state = {0};
	const void *blob;
	struct reply reply;
	int fd;

	reply = end_call_full(end, &cmd, NULL, -1, &blob, &fd);
	state.ready = reply.v[0] != 0;
	state.lost = (unsigned int)reply.v[1];
	state.closed = reply.v[2] != 0;
	state.code = (enum err_code)reply.v[3];
	state.open = reply.v[4] != 0;
	snprintf(state.text, sizeof(state.text), "%s", (const char *)blob);
	return state;
}

int end_peer_open(struct end *end, const struct end *other, bool dial,
		  const uint8_t *token_in, const uint8_t *token_out, struct err *err_p)
{
	struct cmd_peer peer = {.address_len = (uint32_t)other->address_len};
	struct cmd cmd = {.type = CMD_PEER_OPEN,
			  .blob_len = sizeof(peer),
			  .a = {other->index, end == other, dial}};
	const void *blob;
	struct reply reply;
	int fd;

	memset(peer.instance, (int)other->index + 1, sizeof(peer.instance));
	memcpy(peer.token_in, token_in, XP_TOKEN_BYTES);
	memcpy(peer.token_out, token_out, XP_TOKEN_BYTES);
	memcpy(peer.address, other->address, other->address_len);
	reply = end_call_full(end, &cmd, &peer, -1, &blob, &fd);
	if (reply.result < 0 && err_p)
		*err_p = reply.err;
	return reply.result;
}

void end_peer_close(struct end *end, const struct end *other)
{
	if (!end->alive || !end_peer(end, other).open)
		return;
	end_call(end, CMD_PEER_CLOSE, other->index, 0, 0, 0);
	CHECK(AWAIT(end->world, end_peer(end, other).closed), "peer_close does not end");
	end_call(end, CMD_PEER_CLEAR, other->index, 0, 0, 0);
}

static bool both_ready(struct end *a, struct end *b)
{
	return end_peer(a, b).ready && end_peer(b, a).ready;
}

/* The later letter dials. False: lost on the way, and to be tried again. */
static bool connect_once(struct world *world, struct end *a, struct end *b)
{
	/* libucp may lose a connection that is made as another one ends ("Endpoint
	 * timeout"): it is made again, as the daemon does */
	const bool again = strcmp(world->backend->transport, "ucx") == 0;
	uint8_t(*tokens)[ENDS_MAX][XP_TOKEN_BYTES] = world->tokens;
	struct err err = {0};
	int r;

	for (unsigned int i = 0; i < XP_TOKEN_BYTES; i++) {
		tokens[a->index][b->index][i] = (uint8_t)world_random(world, 256);
		tokens[b->index][a->index][i] = (uint8_t)world_random(world, 256);
	}
	r = end_peer_open(a, b, false, tokens[b->index][a->index],
			  tokens[a->index][b->index], &err);
	CHECK(r == 0, "peer_open: %s", err.text);
	if (b != a) {
		r = end_peer_open(b, a, true, tokens[a->index][b->index],
				  tokens[b->index][a->index], &err);
		CHECK(r == 0, "peer_open: %s", err.text);
	}
	CHECK(AWAIT(world, both_ready(a, b) || (again && (end_peer(a, b).lost ||
							  end_peer(b, a).lost))),
	      "the peers do not get ready (%s %s)", end_peer(a, b).text,
	      end_peer(b, a).text);
	return both_ready(a, b);
}

void world_connect(struct world *world, struct end *a, struct end *b)
{
	for (unsigned int tries = 0; !connect_once(world, a, b); tries++) {
		CHECK(tries < 3, "the peers do not get ready (%s %s)",
		      end_peer(a, b).text, end_peer(b, a).text);
		end_peer_close(a, b);
		if (b != a)
			end_peer_close(b, a);
	}
}

void end_policy(struct end *end, enum puppet_policy policy)
{
	end_call(end, CMD_POLICY, policy, 0, 0, 0);
}

uint64_t end_requests(struct end *end)
{
	return end_call(end, CMD_IN_COUNT, 0, 0, 0, 0).v[0];
}

bool end_settled(struct end *end)
{
	struct reply reply = end_call(end, CMD_LIVE, 0, 0, 0, 0);

	return reply.v[0] == 0 && reply.v[1] == 0;
}

bool world_settled(struct world *world)
{
	for (unsigned int i = 0; i < ENDS_MAX; i++) {
		if (world->end[i] && world->end[i]->alive && !end_settled(world->end[i]))
			return false;
	}
	return true;
}

void world_settle(struct world *world)
{
	CHECK(AWAIT(world, world_settled(world)), "a done callback never comes");
}

void world_kill(struct world *world, struct end *end)
{
	assert(end != world->end[0]);
	if (end->puppet) {
		fake_node_vanish(puppet_transport(end->puppet));
	} else {
		end_signal(end, SIGKILL);
		if (!end->far)
			waitpid(end->pid, NULL, 0);
	}
	end->alive = false;
	world->spent = true;
}

/* ---- making and ending ---- */

static int end_spawn(struct world *world, struct end *end)
{
	const char *keeper = getenv("KVD_CONFORM_FAR");

	end->far = keeper != NULL;
	if (keeper)
		return err_pass(keeper_dial(keeper, &end->sock));
	return err_pass(puppet_spawn(world->backend->transport, &end->pid, &end->sock));
}

static int end_start(struct world *world, unsigned int index)
{
	struct end *end = &world->store[index];
	bool here = index == 0 || world->backend->is_virtual;
	int r;

	end->world = world;
	end->index = index;
	end->sock = -1;
	if (here)
		r = puppet_new(backend_ops(world->backend), &world->env, &end->puppet);
	else
		r = end_spawn(world, end);
	if (r < 0)
		return err_pass(r);
	end->alive = true;
	world->end[index] = end;
	return 0;
}

static void end_learn(struct end *end)
{
	struct cmd cmd = {.type = CMD_ADDRESS};
	const void *blob;
	struct reply reply;
	int fd;

	reply = end_call_full(end, &cmd, NULL, -1, &blob, &fd);
	end->address_len = reply.blob_len;
	memcpy(end->address, blob, reply.blob_len);
	end->caps = (uint32_t)reply.v[0];
	end_policy(end, POLICY_LAND);
}

int world_new(const struct backend *backend, bool self, uint64_t seed,
	      struct world **world_p)
{
	struct world *world = mem_zalloc(sizeof(*world));
	int r;

	if (!world)
		return -ENOMEM;
	*world_p = world;
	world->backend = backend;
	world->self = self;
	world->seed = seed;
	world->big_bytes = backend->is_virtual ? 1u << 20 : 8u << 20;
	list_init(&world->areas);
	list_init(&world->deals);
	list_init(&world->stills);
	r = backend_env_new(backend->transport, backend->is_virtual, &world->env);
	if (r == 0 && backend->is_virtual)
		r = fake_hub_new(world->env.loop, seed, &world->hub);
	if (r == 0 && world->hub)
		backend->tune(world);
	for (unsigned int i = 0; r == 0 && i < (self ? 1 : ENDS_MAX); i++)
		r = end_start(world, i);
	if (r < 0)
		return err_pass(r);
	if (self)
		world->end[1] = world->end[0];
	for (unsigned int i = 0; i < ENDS_MAX; i++) {
		if (world->end[i])
			end_learn(world->end[i]);
	}
	world_connect(world, world->end[0], world->end[1]);
	if (!self)
		world_connect(world, world->end[0], world->end[2]);
	return 0;
}

static bool puppet_stop(struct world *world, struct puppet *puppet)
{
	const struct cmd cmd = {.type = CMD_EXIT};
	struct reply reply;
	const void *blob;
	bool ended;
	int fd;

	puppet_do(puppet, &cmd, NULL, -1, &reply, &blob, &fd);
	ended = AWAIT(world, puppet_ended(puppet));
	if (ended)
		puppet_free(puppet);
	else
		fprintf(stderr, "# an end's peers do not close\n");
	return ended;
}

/* Its exit status; false: it does not end. */
static bool process_wait(struct world *world, struct end *end, int *status_p)
{
	const struct cmd cmd = {.type = end->far ? (uint32_t)KEEP_EXIT : CMD_EXIT};
	struct reply reply;
	int fd = -1;

	if (!send_all(end->sock, &cmd, sizeof(cmd), -1))
		return false;
	if (!end->far)
		return AWAIT(world, waitpid(end->pid, status_p, WNOHANG) == end->pid);
	remote_settle(end);
	if (!AWAIT(world, reply_waits(end)) ||
	    !recv_all(end->sock, &reply, sizeof(reply), &fd))
		return false;
	*status_p = (int)reply.v[0];
	return true;
}

static bool process_stop(struct world *world, struct end *end)
{
	int status = -1;

	if (!end->alive)
		return true;
	if (!process_wait(world, end, &status)) {
		fprintf(stderr, "# end %c does not end\n", 'A' + (char)end->index);
		if (!end->far) {
			kill(end->pid, SIGKILL);
			waitpid(end->pid, &status, 0);
		}
		return false;
	}
	if (status != 0)
		fprintf(stderr, "# end %c ended with status %#x\n",
			'A' + (char)end->index, (unsigned int)status);
	return status == 0;
}

static bool end_stop(struct world *world, struct end *end)
{
	bool ok;

	if (end->puppet)
		return puppet_stop(world, end->puppet);
	if (end->sock < 0)
		return true;
	ok = process_stop(world, end);
	close(end->sock);
	return ok;
}

bool world_free(struct world *world)
{
	bool ok = true;

	for (unsigned int i = ENDS_MAX; i-- > 0;) {
		if (world->end[i] == &world->store[i])
			ok = end_stop(world, world->end[i]) && ok;
	}
	if (!ok)
		return false; /* what hangs would crash the rest: leave it */
	if (world->hub)
		fake_hub_free(world->hub);
	backend_env_free(&world->env);
	mem_free(world);
	return ok;
}

void world_abandon(struct world *world)
{
	for (unsigned int i = 0; i < ENDS_MAX; i++) {
		struct end *end = world->end[i];

		if (!end || end->puppet || end->sock < 0)
			continue;
		if (end->pid > 0) {
			kill(end->pid, SIGKILL);
			waitpid(end->pid, NULL, 0);
		}
		close(end->sock); /* the end of it, to a keeper */
	}
}
