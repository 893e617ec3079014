/* SPDX-License-Identifier: Apache-2.0 */
/* stdio: descriptors 0, 1 and 2, before a program opens anything. */
#ifndef KVD_BASE_STDIO_H
#define KVD_BASE_STDIO_H

/* Opens missing standard descriptors as /dev/null: a socket or file that got such a
 * number would receive printed output. First in main(). Ends the program with 1 where
 * there is no /dev/null: nothing can be reported then. */
void stdio_open(void);

#endif
