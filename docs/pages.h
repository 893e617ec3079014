/* SPDX-License-Identifier: Apache-2.0 */
/* pages: what docs/reference.md is made of (Markdown), and kvd.conf(5) (roff). */
#ifndef KVD_DOCS_PAGES_H
#define KVD_DOCS_PAGES_H

#include <stdio.h>

void page_commands(FILE *out); /* every control command and every error code */
void page_metrics(FILE *out);  /* every metric */
void page_messages(FILE *out); /* every message between daemons */
void page_options(FILE *out);  /* every option: the OPTIONS of the man page */

#endif
