/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies that wait for a disk, on separate threads: a copy thread that waited would be
 * missing for all jobs with bytes in memory.
 *
 * Rejected: the disk of the store (store/disk.h). It lies above this layer, and its few
 * threads are shared: a single file that does not respond would occupy them. Engines pass
 * files on disks that this daemon's operator did not choose, so one of them must not
 * delay the others: a job has at most JOB_SLICES slices in flight, a user USER_SLICES.
 * Threads are made when work finds none idle, THREADS_MAX in all, and stay.
 *
 * A slice is one to a few system calls (file_rows.h). A call to a disk that does not
 * respond cannot be ended, so neither cancel nor deadline ends its job earlier:
 * "canceled" means that nothing touches the memory or the file any more. If the daemon is
 * to end meanwhile, it does not wait for it (kvd.c, `abandoned`).
 */
#include "daemon/memory/copy_file.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>

#include "daemon/base/cpu.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/memory/copy.h"
#include "daemon/memory/copy_done.h"
#include "daemon/memory/file_rows.h"

/* Of the CPU's slices: a call costs more than a thread's turn. */
#define SLICE_FACTOR 4u
/* Scattered rows are a call each, which a device executes in parallel. */
#define SLICE_ROWS 8u
#define JOB_SLICES 16
#define USER_SLICES 64u
#define THREADS_MAX 256u

struct file_thread {
	struct copy_file *file;
	pthread_t thread;
	struct file_hand *hand;
};

/* Users with a job. */
struct file_user {
	struct list link;
	uid_t uid;
	struct list ready;    /* jobs with another slice to start */
	unsigned int running; /* slices */
	unsigned int jobs;
};

struct copy_file {
	struct copy_done done; /* its lock is that of all here */
	pthread_cond_t more;
	struct list users; /* a served user moves to the end */
	uint64_t slice_bytes;
	unsigned int idle, thread_count;
	bool stopping;
	struct file_thread threads[THREADS_MAX];
};

static void *copy_file_worker_main(void *arg);

/* ---- threads ---- */

static int copy_file_thread_start(struct copy_file *file)
{
	struct file_thread *thread = &file->threads[file->thread_count];
	int r = file_hand_new(&thread->hand);

	thread->file = file;
	if (r == 0)
		r = thread_start("kvd-file", copy_file_worker_main, thread,
				 &thread->thread);
	if (r < 0) {
		file_hand_free(thread->hand);
		thread->hand = NULL;
		return err_pass(r);
	}
	file->thread_count++;
	return 0;
}

/* There is a slice to start. The lock is held. A failure costs nothing while there is a
 * thread at all. */
static int copy_file_wake(struct copy_file *file, const struct file_user *user)
{
	int r;

	if (file->idle > 0) {
		pthread_cond_signal(&file->more);
		return 0;
	}
	if (file->thread_count == THREADS_MAX || user->running >= USER_SLICES)
		return 0;
	r = copy_file_thread_start(file);
	if (r < 0 && file->thread_count == 0)
		return err_pass(r);
	if (r < 0)
		err_clear();
	return 0;
}

/* ---- users ---- */

static struct file_user *user_find(struct copy_file *file, uid_t uid)
{
	struct file_user *user;

	list_foreach(user, &file->users, link)
		if (user->uid == uid)
			return user;
	return NULL;
}

static int user_take(struct copy_file *file, uid_t uid, struct file_user **user_p)
{
	struct file_user *user = user_find(file, uid);

	if (!user) {
		user = mem_zalloc(sizeof(*user));
		if (!user)
			return err_pass(-ENOMEM);
		user->uid = uid;
		list_init(&user->ready);
		list_push_back(&file->users, &user->link);
	}
	user->jobs++;
	*user_p = user;
	return 0;
}

static void user_drop(struct file_user *user)
{
	assert(user->jobs > 0);
	if (--user->jobs > 0)
		return;
	assert(user->running == 0);
	list_remove(&user->link);
	mem_free(user);
}

/* ---- slices ---- */

/* The lock is held. A job passed on by copy_done_settle() no longer counts for its user,
 * and may be freed at once. */
static void job_settle(struct copy_file *file, struct copy_job *job)
{
	struct file_user *user = job->file_user;
	bool over = atomic_load(&job->slices_running) == 0 &&
		    (job->next_byte == job->end || job->result < 0 ||
		     atomic_load(&job->canceled));

	if (over)
		job->file_user = NULL;
	copy_done_settle(&file->done, job);
	if (over)
		user_drop(user);
}

static bool job_may_begin(const struct copy_job *job)
{
	return job->next_byte < job->end && job->result == 0 &&
	       !atomic_load(&job->canceled) &&
	       atomic_load(&job->slices_running) < JOB_SLICES;
}

/* The next job; its user moves behind all others. */
static struct copy_job *job_pick(struct copy_file *file)
{
	struct file_user *user;

	list_foreach(user, &file->users, link) {
		struct copy_job *job = list_first(&user->ready, struct copy_job, link);

		if (!job || user->running >= USER_SLICES)
			continue;
		list_remove(&user->link);
		list_push_back(&file->users, &user->link);
		return job;
	}
	return NULL;
}

/* The lock is held on entry and on return. */
static void file_slice_run(struct file_thread *thread, struct copy_job *job)
{
	struct copy_file *file = thread->file;
	struct file_user *user = job->file_user;
	uint64_t begin = job->next_byte, end = job->end, bounced = 0;
	int r;

	if (end - begin > job->slice_bytes)
		end = begin + job->slice_bytes;
	job->next_byte = end;
	list_remove(&job->link);
	atomic_fetch_add(&job->slices_running, 1);
	user->running++;
	if (job_may_begin(job)) {
		list_push_back(&user->ready, &job->link);
		(void)copy_file_wake(file, user); /* this thread exists */
	}
	pthread_mutex_unlock(&file->done.lock);

	r = file_rows_move(thread->hand, job, begin, end, &bounced);
	if (r == 0)
		copy_done_slice(job, end - begin, bounced > 0);

	pthread_mutex_lock(&file->done.lock);
	user->running--;
	atomic_fetch_sub(&job->slices_running, 1);
	list_remove(&job->link);
	if (file->stopping)
		atomic_store(&job->canceled, true);
	if (r < 0)
		copy_done_fail(job, r);
	else if (job_may_begin(job))
		list_push_back(&user->ready, &job->link);
	job_settle(file, job);
}

static void *copy_file_worker_main(void *arg)
{
	struct file_thread *thread = arg;
	struct copy_file *file = thread->file;

	cpu_prompt(); /* a disk waits for it; it computes little and waits much */
	pthread_mutex_lock(&file->done.lock);
	for (;;) {
		struct copy_job *job = job_pick(file);

		if (job) {
			file_slice_run(thread, job);
		} else if (file->stopping) {
			break;
		} else {
			file->idle++;
			pthread_cond_wait(&file->more, &file->done.lock);
			file->idle--;
		}
	}
	pthread_mutex_unlock(&file->done.lock);
	return NULL;
}

/* ---- interface ---- */

int copy_file_new(struct loop *loop, uint64_t slice_bytes, struct copy_file **file_p)
{
	struct copy_file *file = mem_zalloc(sizeof(*file));
	int r;

	if (!file)
		return err_pass(-ENOMEM);
	file->slice_bytes = slice_bytes * SLICE_FACTOR;
	list_init(&file->users);
	r = copy_done_init(&file->done, loop);
	if (r < 0) {
		mem_free(file);
		return err_pass(r);
	}
	pthread_cond_init(&file->more, NULL);
	*file_p = file;
	return 0;
}

static void user_cancel(struct copy_file *file, struct file_user *user)
{
	struct copy_job *job;

	user->jobs++; /* a local reference, while its list is walked */
	while ((job = list_first(&user->ready, struct copy_job, link))) {
		atomic_store(&job->canceled, true);
		list_remove(&job->link);
		job_settle(file, job);
	}
	user_drop(user);
}

void copy_file_free(struct copy_file *file)
{
	struct file_user *user;

	if (!file)
		return;
	pthread_mutex_lock(&file->done.lock);
	file->stopping = true;
	list_foreach_safe(user, &file->users, link)
		user_cancel(file, user);
	pthread_cond_broadcast(&file->more);
	pthread_mutex_unlock(&file->done.lock);
	for (unsigned int i = 0; i < file->thread_count; i++) {
		pthread_join(file->threads[i].thread, NULL);
		file_hand_free(file->threads[i].hand);
	}
	assert(list_empty(&file->users));
	copy_done_fini(&file->done);
	pthread_cond_destroy(&file->more);
	mem_free(file);
}

int copy_file_submit(struct copy_file *file, struct copy_job *job)
{
	struct file_user *user = NULL;
	uint64_t row = job->plan->row_median;
	int r;

	assert(job->on_done && job->begin < job->end);
	job->slice_bytes = row > 0 && row < file->slice_bytes / SLICE_ROWS
				   ? row * SLICE_ROWS
				   : file->slice_bytes;
	pthread_mutex_lock(&file->done.lock);
	r = user_take(file, file_rows_of(job)->owner.uid, &user);
	if (r == 0) {
		job->file_user = user;
		list_push_back(&user->ready, &job->link);
		r = copy_file_wake(file, user);
		if (r < 0) {
			list_remove(&job->link);
			user_drop(user);
		}
	}
	pthread_mutex_unlock(&file->done.lock);
	return err_pass(r);
}

void copy_file_cancel(struct copy_file *file, struct copy_job *job)
{
	pthread_mutex_lock(&file->done.lock);
	/* its slices are waited for; with all of them started the last one settles it. A
	 * finished job waits for on_done. */
	if (!atomic_exchange(&job->canceled, true) && job->file_user &&
	    job->next_byte < job->end) {
		list_remove(&job->link);
		job_settle(file, job);
	}
	pthread_mutex_unlock(&file->done.lock);
}
